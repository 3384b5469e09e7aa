"""The drafter's interface, for n-gram drafts, early exit and a draft model.

A drafter proposes inside a decode step, catches up with what the step accepted, and knows its state
on the devices. It decides neither when drafts are made nor which tokens are accepted.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, UInt32

from pat_jax.engine.device.decode.decode_step import DecodeStep, Moving
from pat_jax.engine.device.ngram import Draft
from pat_jax.engine.device.token_batch import Counts
from pat_jax.engine.sequences.earlier import EarlierResponses
from pat_jax.engine.sequences.page_allocator import num_pages_for
from pat_jax.engine.sequences.responses import Responses
from pat_jax.engine.sequences.state import Runs
from pat_jax.layout.buckets import Buckets, Drafts, Shape
from pat_jax.layout.layout import Layout
from pat_jax.models.config import ModelConfig
from pat_jax.models.policy import Params, Policy
from pat_jax.programs.programs import ProgramTable


class DraftShapes(NamedTuple):
    """Sizes of the policy and its programs that drafters need."""

    model: ModelConfig  # the policy's
    dtype: jnp.dtype
    buckets: Buckets
    page_size: int
    prefill_blocks: int
    ahead: int = 0  # future tokens of each row for which a draft model's cache has pages

    def width(self, length: int) -> int:
        """Returns the number of pages of a row with `length` tokens."""
        return num_pages_for(length, self.page_size)

    def tokens(self, length: int) -> int:
        """Returns how many tokens fit in the pages of a row with `length` tokens."""
        return self.width(length) * self.page_size


class Proposal(NamedTuple):
    """The drafts that are proposed in one step of a burst."""

    draft: Draft
    runs: Runs  # runs that the drafts belong to
    length: Int[Array, " rows"]  # number of tokens of each row's draft that are verified
    # Each row's branch, which begins with another token, and how many of its tokens are verified.
    branch: tuple[Draft, Int[Array, " rows"]] | None = None


class Asked(NamedTuple):
    """The inputs of a drafter in each step of a burst."""

    step: DecodeStep
    params: Params  # the policy's weights
    own_params: Any  # the drafter's weights, see `Drafter.params`
    keys: UInt32[Array, "tokens rows 2"]  # noise of each row's next tokens, `gumbel.position_keys`
    tables: Int[Array, "rows width"]  # pages of each row in the policy's cache
    accept_prob: Float[Array | np.ndarray, "2 kinds places"] | None  # see `token_batch.lengths`
    length: int  # tokens that a row's page table has room for
    num_draft_tokens: int  # per row and step


class Accepted(NamedTuple):
    """The result of verifying a step's drafts."""

    tokens: Int[Array, "rows turns"]  # sampled along each row's draft, or along its branch
    count: Int[Array, " rows"]  # how many of these `tokens` the row generates
    on_draft: Int[Array, " rows"]  # number of accepted tokens of the row's draft
    on_branch: Int[Array, " rows"]  # number of accepted tokens of the row's branch
    taken: Bool[Array, " rows"]  # rows whose branch is accepted


class Rollout(NamedTuple):
    """The parts of one rollout that a drafter's `DraftFeed` uses."""

    shapes: DraftShapes
    programs: ProgramTable
    params: Any  # the drafter's weights, see `Drafter.params`
    responses: Responses
    earlier: EarlierResponses | None


class DraftFeed:
    """Prepares on the host what a rollout's bursts draft from. This base class prepares nothing."""

    @property
    def told(self) -> tuple[np.ndarray, ...]:
        """The host arrays that must be equal in every process before the next burst."""
        return ()

    def prepare(self, shape: Shape) -> None:
        """Prepares the next burst. Called for each burst that is not dispatched behind another."""

    def state(self, layout: Layout, shape: Shape, before: Any) -> Any:
        """Returns the drafter's state for a burst.

        Args:
          before: the state after the burst that this one is dispatched behind, or None.
        """
        del layout, shape, before
        return None

    def keep(self, state: Any) -> None:
        """Keeps the drafter's state that a burst returned, for the next burst."""

    def delete(self) -> None:
        """Frees the memory of the drafter's state."""


@dataclass(frozen=True)
class Drafter(ABC):
    """Proposes the drafts that bursts verify."""

    drafts: Drafts
    policy: Policy | None = None  # the draft model

    @property
    def come_from(self) -> str:
        """A description of the drafter for people. It is equal for drafters whose steps take the
        same time."""
        return self.drafts.come_from(self.policy and self.policy.config)

    @abstractmethod
    def propose(self, asked: Asked, moving: Moving) -> tuple[Proposal, Moving]:
        """Returns drafts for the running rows, and the changed state of the decode step."""

    @abstractmethod
    def catch_up(
        self, asked: Asked, moving: Moving, proposal: Proposal, accepted: Accepted
    ) -> tuple[Any, Counts]:
        """Returns the drafter's state and the counts of draft tokens after a step. `moving` is the
        state before the step."""

    def params(self, layout: Layout, shapes: DraftShapes) -> Any:
        """Returns shapes of the drafter's weights on the devices; None if it has no weights."""
        del layout, shapes

    def state(self, layout: Layout, rows: int, length: int, shapes: DraftShapes) -> Any:
        """Returns shapes of the drafter's state for `rows` rows per replica; None without state."""
        del layout, rows, length, shapes

    def blank(self, zeros: Any, num_replicas: int) -> Any:
        """Returns a state with which the warm-up times bursts, made from a state of zeros."""
        del num_replicas
        return zeros

    def declare(self, table: ProgramTable, layout: Layout, shapes: DraftShapes) -> None:
        """Declares the drafter's own programs, such as a draft model's prefill."""
        del table, layout, shapes

    def load(self, layout: Layout, shapes: DraftShapes) -> Params | None:
        """Loads the weights that do not change during a run; returns None if there are none."""
        del layout, shapes

    def learned(
        self, layout: Layout, shapes: DraftShapes, head: np.ndarray | None
    ) -> jax.Array | None:
        """Returns the drafter's weights that change with each version of the policy, on the
        devices; None if there are none.

        Args:
          head: the early-exit head, float[embed, embed]; None stands for zeros.
        """
        del layout, shapes, head

    def feed(self, rollout: Rollout) -> DraftFeed:
        del rollout
        return DraftFeed()
