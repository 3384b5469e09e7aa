"""What proposes drafts: one interface for texts, a policy's first layers and a draft model.

A drafter proposes inside a decode step, catches up with what the step accepted, and knows what it
keeps on the devices. It decides neither when drafts are made nor which tokens are accepted.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, UInt32

from pat_jax.engine.device.decode.decode_step import DecodeStep, Moving
from pat_jax.engine.device.draft.ngram import Draft
from pat_jax.engine.device.draft.token_batch import Counts
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
    """What drafters ask of the policy and its programs."""

    model: ModelConfig  # the policy's
    dtype: jnp.dtype
    buckets: Buckets
    page_size: int
    prefill_blocks: int
    ahead: int = 0  # tokens of a row for which a draft model's cache has room ahead

    def width(self, length: int) -> int:
        """Pages of a row."""
        return num_pages_for(length, self.page_size)

    def tokens(self, length: int) -> int:
        """That its pages have room for."""
        return self.width(length) * self.page_size


class Proposal(NamedTuple):
    """What a step proposes."""

    draft: Draft
    runs: Runs  # that the drafts are parts of
    length: Int[Array, " rows"]  # tokens of each row's draft that are verified
    # Another draft of each row, which begins with another token, and how much of it is verified.
    branch: tuple[Draft, Int[Array, " rows"]] | None = None


class Asked(NamedTuple):
    """What a drafter has in each step of a burst."""

    step: DecodeStep
    params: Params  # the policy's
    own_params: Any  # the drafter's, see `Drafter.params`
    keys: UInt32[Array, "tokens rows 2"]
    tables: Int[Array, "rows width"]
    accept_prob: Float[Array | np.ndarray, "2 kinds places"] | None  # see `token_batch.lengths`
    length: int  # tokens of a row's table
    num_draft_tokens: int  # draft tokens of a step, for each row


class Accepted(NamedTuple):
    """What came of a step's drafts."""

    tokens: Int[Array, "rows turns"]  # drawn along each row's draft, or along its branch
    count: Int[Array, " rows"]  # of these, that the row generates
    on_draft: Int[Array, " rows"]  # tokens of its draft
    on_branch: Int[Array, " rows"]  # right tokens of its branch
    taken: Bool[Array, " rows"]  # rows whose branch is right


class Rollout(NamedTuple):
    """What a rollout has for the drafter's part on the host."""

    shapes: DraftShapes
    programs: ProgramTable
    params: Any  # the drafter's, see `Drafter.params`
    responses: Responses
    earlier: EarlierResponses | None


class DraftFeed:
    """What one rollout's bursts are handed to draft from, on the host; here nothing."""

    @property
    def told(self) -> tuple[np.ndarray, ...]:
        """Host arrays that every process must have alike before the next burst."""
        return ()

    def prepare(self, shape: Shape) -> None:
        """Called before each burst that is not dispatched behind another."""

    def state(self, layout: Layout, shape: Shape, before: Any) -> Any:
        """What a burst is handed.

        Args:
          before: what the burst leaves that this one is dispatched behind; else None.
        """
        del layout, shape, before
        return None

    def keep(self, state: Any) -> None:
        """What a burst leaves."""

    def delete(self) -> None:
        """Frees the memory."""


@dataclass(frozen=True)
class Drafter(ABC):
    """Which drafts bursts may verify, and what proposes them."""

    drafts: Drafts
    policy: Policy | None = None  # of a draft model

    @property
    def come_from(self) -> str:
        """For people; equal where drafts take the same time."""
        return self.drafts.come_from(self.policy and self.policy.config)

    @abstractmethod
    def propose(self, asked: Asked, moving: Moving) -> tuple[Proposal, Moving]:
        """Drafts of the running rows, inside a step."""

    @abstractmethod
    def catch_up(
        self, asked: Asked, moving: Moving, proposal: Proposal, accepted: Accepted
    ) -> tuple[Any, Counts]:
        """The drafter's state and the counts behind a step; `moving` is of before it."""

    def params(self, layout: Layout, shapes: DraftShapes) -> Any:
        """Shapes of its weights on the devices; None where it has none."""
        del layout, shapes

    def state(self, layout: Layout, rows: int, length: int, shapes: DraftShapes) -> Any:
        """Shapes of what a burst of `rows` of a replica is handed; None where that is nothing."""
        del layout, rows, length, shapes

    def blank(self, zeros: Any, num_replicas: int) -> Any:
        """A state to time bursts with, made of one of zeros."""
        del num_replicas
        return zeros

    def declare(self, table: ProgramTable, layout: Layout, shapes: DraftShapes) -> None:
        """Programs of its own besides bursts."""
        del table, layout, shapes

    def load(self, layout: Layout, shapes: DraftShapes) -> Params | None:
        """Weights that are loaded once; None where there are none."""
        del layout, shapes

    def learned(
        self, layout: Layout, shapes: DraftShapes, head: np.ndarray | None
    ) -> jax.Array | None:
        """Weights that come with each version of the policy; None where there are none.

        Args:
          head: float[embed, embed]; None: zeros.
        """
        del layout, shapes, head

    def feed(self, rollout: Rollout) -> DraftFeed:
        del rollout
        return DraftFeed()
