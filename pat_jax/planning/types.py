"""The words the planner and the engine share: what is running, and what to do next."""

import math
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import numpy as np

from pat_jax.planning.draft_counts import DraftResult

Carry = Literal["migrate", "recompute", "mixed"]  # how the KV cache crosses a switch
OneWay = Literal["migrate", "recompute"]
# What a decode step reads of the KV cache: as many tokens for every row as its length bucket has room
# for, or those that each row holds.
Reads = Literal["bucket", "held"]
TEXTS = "texts"  # where drafts are from that no model generates
MIGRATE_ALL, RECOMPUTE_ALL = 0, 2**31 - 1  # see Plan.recompute_below
WAYS: dict[int, Carry] = {MIGRATE_ALL: "migrate", RECOMPUTE_ALL: "recompute"}


def recompute_below(way: OneWay) -> int:
    """`Plan.recompute_below` when all sequences go the same way."""
    return MIGRATE_ALL if way == "migrate" else RECOMPUTE_ALL


def way(recomputed: int, running: int) -> Carry:
    """What to call a switch in which `recomputed` of `running` sequences are recomputed."""
    if recomputed:
        return "recompute" if recomputed == running else "mixed"
    return "migrate"


class Split(NamedTuple):
    """How many ways the devices split a batch (dp) and a model (tp). Written `dp2tp4`."""

    dp: int
    tp: int

    def __str__(self) -> str:
        return f"dp{self.dp}tp{self.tp}"


@dataclass(frozen=True)
class Load:
    """The running sequences, one entry each, and where they sit."""

    replica: np.ndarray  # int[running], replica
    generated: np.ndarray  # int[running], tokens sampled so far
    context: np.ndarray  # int[running], tokens in the KV cache: prompt and response
    remaining_tokens: np.ndarray  # int[running], tokens that may still be sampled
    # int[running], the same for samples of one prompt; None: unknown
    prompt: np.ndarray | None = None
    waiting: int = 0  # sequences without a row, that get one when a running one ends
    step: float = 0  # decode steps of the rollout so far, as many as they would be without drafts

    @property
    def running(self) -> int:
        return len(self.replica)

    @property
    def unfinished(self) -> int:
        return self.running + self.waiting


@dataclass(frozen=True)
class BurstResult:
    """A decode burst that has run: its buckets, what it read, what it took."""

    split: Split
    rows: int  # row bucket of a replica
    length: int  # length bucket, tokens
    running: int  # unfinished sequences of all replicas when it began
    held: float  # tokens in the caches of the replica that holds most, on average over the steps
    steps: int
    seconds: float  # of all steps
    num_draft_tokens: int = 0  # tokens of drafts that each step had room for, for each row

    @property
    def step_s(self) -> float:
        return self.seconds / self.steps


@dataclass(frozen=True)
class Prediction:
    """What the profile says of a move to another layout, or to other replicas. Seconds."""

    source: Split
    target: Split
    reshard_s: float  # of the weights
    kv_s: float  # of the KV cache
    step_s: np.ndarray | None = None  # float[layouts], a decode step afterwards; of a switch None


class DraftLimits(NamedTuple):
    tokens: int = 0  # most of one draft
    # tokens of a replica's sequences, with more no model drafts; one always does
    cached: float = math.inf


UNLIMITED = DraftLimits()


@dataclass(frozen=True)
class DraftPrediction:
    """What a step with drafts is expected to say and to take."""

    tokens: float  # that a row generates
    step_s: float
    plain_s: float  # without drafts

    def saved_s(self, steps: float) -> float:
        """Expected of so many steps."""
        return steps * (self.tokens * self.plain_s - self.step_s)


@dataclass(frozen=True)
class Plan:
    """The planner's decision: where running sequences go, and how the next burst runs.

    They move if `split` is another layout than now, or if there is a `replica`.
    """

    split: Split  # the layout of the next burst
    # end the burst when the fullest replica has this many running sequences or fewer
    threshold: int
    # In a switch, sequences with fewer tokens in the cache are recomputed, the others migrate.
    recompute_below: int = MIGRATE_ALL
    # int[running], the replica of each from now on, in a layout that stays; None: where they are.
    replica: np.ndarray | None = field(default=None, compare=False)
    predicted_saving_s: float = 0.0  # of decoding to the end; of a switch less its cost
    predicted_cost_s: float = 0.0  # of the move
    predicted_remaining_s: float = 0.0  # of the whole plan
    reason: str = ""
    prediction: Prediction | None = None  # where the planner learns from what comes of the move
    # Tokens of drafts that each step of the next burst is to have room for, for each row, and how likely
    # each is right, by which the room is given to them: see `Acceptance.accept_prob`.
    num_draft_tokens: int = 0
    accept_prob: np.ndarray | None = field(default=None, compare=False)
    predicted: DraftPrediction | None = None  # of these drafts

    def moves_from(self, current: Split) -> bool:
        return self.replica is not None or self.split != current


@dataclass(frozen=True)
class Moved:
    """The move of a plan, as it went."""

    plan: Plan
    seconds: float
    carry: Carry = "migrate"
    is_whole: bool = True  # all sequences that were to go have gone


# What came of a decision: a burst that ran and its drafts, or sequences that moved.
Outcome = BurstResult | DraftResult | Moved
