"""The rollout and the machine that `simulator.py` replays."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from pat_jax.config.rollout import RolloutConfig
from pat_jax.engine.sequences.page_allocator import num_pages_for
from pat_jax.layout.buckets import NO_DRAFTS, Buckets, Drafts, Pace, Shapes
from pat_jax.planning.drafts import Acceptance
from pat_jax.planning.latency.model import LatencyModel
from pat_jax.planning.memory import MemoryModel
from pat_jax.planning.types import Load, Split


@dataclass(frozen=True)
class Workload:
    """One rollout's sequences, with the true length of each response."""

    prompts: np.ndarray  # int[sequences], tokens of each prompt
    responses: np.ndarray  # int[sequences], tokens of each; hidden from planners
    cap: int  # tokens; longer responses are cut
    prompt_id: np.ndarray | None = None  # int[sequences], equal for samples of a prompt, if known
    # The true acceptance of each sequence's copied drafts; sequences may share one. None: all have
    # the machine's.
    accepts: Sequence[Acceptance] | None = None

    def __post_init__(self):
        if not ((self.responses >= 1).all() and (self.responses <= self.cap).all()):
            raise ValueError(f"response lengths must lie in 1 … {self.cap}, the cap.")
        if self.accepts is not None and len(self.accepts) != self.size:
            raise ValueError("every sequence has an acceptance, or none has.")

    @property
    def size(self) -> int:
        return len(self.responses)

    def load(self, capacity: int) -> Load:
        """Returns the load before the first token; at most `capacity` sequences have rows."""
        running = min(self.size, capacity)
        zeros = np.zeros(running, int)
        left = np.full(running, self.cap)
        prompt = None if self.prompt_id is None else self.prompt_id[:running]
        return Load(zeros, zeros, self.prompts[:running], left, prompt, self.size - running)


@dataclass(frozen=True)
class Machine:
    """The machine on which a rollout is replayed: its true costs and compiled shapes."""

    truth: LatencyModel  # its true costs
    splits: tuple[Split, ...]
    buckets: Buckets
    burst_steps: int = 64
    check_every: int = 8
    # Of the pools: a sequence that finds no pages waits, or another is preempted. None: they hold
    # every sequence.
    memory: MemoryModel | None = None
    runs_ahead: bool = False  # see `Backend`
    # Seconds of the host in a decode step, per running sequence of all replicas; not in `truth`.
    host_s_per_sequence: float = 0.0
    drafts: Drafts = NO_DRAFTS  # drafts that have compiled programs
    acceptance: Acceptance | None = None  # true acceptance of drafts; None: there are no drafts

    def __post_init__(self):
        if self.drafts.num_draft_tokens and self.acceptance is None:
            raise ValueError("drafts that have programs need an acceptance.")
        if self.acceptance and self.acceptance.is_generated != self.drafts.is_generated:
            raise ValueError(
                "drafts of a model need an acceptance of their own, not that of copied drafts."
            )

    @classmethod
    def of(
        cls,
        truth: LatencyModel,
        splits: Sequence[Split],
        config: RolloutConfig,
        *,
        capacity: int,
        **rest: Any,
    ) -> "Machine":
        """Returns the machine whose buckets, bursts and tests are those of `config`, with rows for
        `capacity` sequences; `rest` sets other fields."""
        buckets = Buckets.of(splits, capacity, config)
        truth = truth.on(buckets.rows, buckets.lengths)
        return cls(truth, tuple(splits), buckets, config.burst_steps, config.check_every, **rest)

    def pace(self, num_draft_tokens: int) -> Pace:
        return Pace.of(self.check_every, self.burst_steps, self.drafts.draft(num_draft_tokens))

    def shapes(self, longest: int) -> Shapes:
        """Returns the program shapes for a rollout whose longest sequence has `longest` tokens."""
        size = self.truth.page_size
        rows = self.buckets.rows
        pages: Mapping[Split, int] = {
            split: rows[split][-1] * num_pages_for(longest, size) + 1 for split in self.splits
        }
        if self.memory is not None:
            pages = self.memory.pages
            size = self.memory.page_size
        return Shapes(self.buckets, pages, size, self.burst_steps, self.check_every, self.drafts)

    @property
    def capacity(self) -> int:
        """Number of sequences that have rows at once; others wait until one of them ends."""
        return min(split.dp * self.buckets.rows[split][-1] for split in self.splits)
