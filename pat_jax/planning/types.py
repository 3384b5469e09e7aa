"""The words the planner and the engine share: what is running, and what to do next."""

import math
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import numpy as np

from pat_jax.planning.drafts import Drafted

Carry = Literal["migrate", "recompute", "mixed"]  # how the KV cache crosses a switch
OneWay = Literal["migrate", "recompute"]
# What a decode step reads of the KV cache: as many tokens for every row as its length bucket has room
# for, or those that each row holds.
Reads = Literal["bucket", "held"]
TEXTS = "texts"  # where drafts are from that no model says
MIGRATE_ALL, RECOMPUTE_ALL = 0, 2**31 - 1  # see Plan.recompute_below
WAYS: dict[int, Carry] = {MIGRATE_ALL: "migrate", RECOMPUTE_ALL: "recompute"}


def recompute_below(way: OneWay) -> int:
    """`Plan.recompute_below` when all sequences go the same way."""
    return MIGRATE_ALL if way == "migrate" else RECOMPUTE_ALL


def way(recomputed: int, live: int) -> Carry:
    """What to call a switch in which `recomputed` of `live` sequences are recomputed."""
    if recomputed:
        return "recompute" if recomputed == live else "mixed"
    return "migrate"


class Split(NamedTuple):
    """How many ways the devices split a batch (dp) and a model (tp). Written `dp2tp4`."""

    dp: int
    tp: int

    def __str__(self) -> str:
        return f"dp{self.dp}tp{self.tp}"


@dataclass(frozen=True)
class Load:
    """The live sequences, one entry each, and where they sit."""

    group: np.ndarray  # int[live], data-parallel group
    generated: np.ndarray  # int[live], tokens sampled so far
    context: np.ndarray  # int[live], tokens in the KV cache: prompt and response
    budget: np.ndarray  # int[live], tokens that may still be sampled
    prompt: np.ndarray | None = None  # int[live], the same for samples of one prompt; None: unknown
    waiting: int = 0  # sequences without a row, that get one when a live one ends
    step: float = 0  # decode steps of the rollout so far, as many as they would be without drafts

    @property
    def live(self) -> int:
        return len(self.group)

    @property
    def unfinished(self) -> int:
        return self.live + self.waiting


@dataclass(frozen=True)
class Stagger:
    """Whether the samples of a prompt begin one after the other: see `planning/planner/stagger.py`."""

    is_on: bool
    predicted_saving_s: float = 0.0  # of decoding, before the cost
    predicted_cost_s: float = 0.0  # of prompts that are computed again
    reason: str = "asked for"


@dataclass(frozen=True)
class Ran:
    """A decode burst that has run: its buckets, what it read, what it took."""

    split: Split
    rows: int  # row bucket of a group
    length: int  # length bucket, tokens
    live: int  # unfinished sequences of all groups when it began
    held: float  # tokens in the caches of the group that holds most, on average over the steps
    steps: int
    seconds: float  # of all steps
    budget: int = 0  # tokens of drafts that each step had room for, for each row

    @property
    def step_s(self) -> float:
        return self.seconds / self.steps


@dataclass(frozen=True)
class Prediction:
    """What the profile says of taking sequences to another layout, or to other groups of one. Seconds."""

    source: Split
    target: Split
    reslice_s: float  # of the weights
    kv_s: float  # of the KV cache
    step_s: np.ndarray | None = None  # float[layouts], a decode step afterwards; of a switch None
    visits: int = 1  # of the host


class DraftLimits(NamedTuple):
    tokens: int = 0  # most of one draft
    cached: float = (
        math.inf
    )  # tokens of a group's sequences, with more no model drafts; one always does


UNLIMITED = DraftLimits()


@dataclass(frozen=True)
class DraftPrediction:
    """What a step with drafts is expected to say and to take."""

    tokens: float  # that a row says
    step_s: float
    plain_s: float  # without drafts

    def saved_s(self, steps: float) -> float:
        """Expected of so many steps."""
        return steps * (self.tokens * self.plain_s - self.step_s)


@dataclass(frozen=True)
class Plan:
    split: Split  # the layout of the next burst
    threshold: int  # end the burst when the fullest group has this many live sequences or fewer
    # In a switch, sequences with fewer tokens in the cache are recomputed, the others migrate.
    recompute_below: int = MIGRATE_ALL
    predicted_saving_s: float = 0.0  # staying to the end minus this plan, its switches included
    predicted_cost_s: float = 0.0  # of the switch to `split`, if it is one
    predicted_remaining_s: float = 0.0  # of the whole plan
    reason: str = ""
    prediction: Prediction | None = None  # where the planner learns from what comes of a switch
    # Tokens of drafts that each step of the next burst is to have room for, for each row, and how likely
    # each is right, by which the room is given to them: see `Acceptance.reach`.
    budget: int = 0
    reach: np.ndarray | None = field(default=None, compare=False)
    predicted: DraftPrediction | None = None  # of these drafts


class SendLimits(NamedTuple):
    """Of a move's first stage."""

    rounds: int = 0  # of pages that are on their way at once, at most: memory holds no more
    every: int = 1  # steps, of which a burst makes a multiple
    most: int = 1  # steps of a burst, at most


class Sending(NamedTuple):
    """The first of a move's two stages: pages that will not change any more are sent while all sequences
    decode on where they are (RLHFSpec, arXiv 2512.04752)."""

    rounds: int  # at most
    steps: int  # of the burst meanwhile


@dataclass(frozen=True)
class Balance:
    """Sequences that are to go to other data-parallel groups of their layout, with their pages."""

    group: np.ndarray  # int[live], where each is to be
    predicted_saving_s: float = 0.0  # to the end, before the cost
    predicted_cost_s: float = 0.0
    reason: str = ""
    prediction: Prediction | None = None  # where the planner learns from what comes of it
    sending: Sending | None = None  # first; None: all pages move at once


@dataclass(frozen=True)
class Relocated:
    """A switch, or a move between the groups of a layout, as it went."""

    decision: Plan | Balance
    seconds: float
    carry: Carry = "migrate"
    # Of a move: some that were to go have not, or there was no second stage.
    came: Literal["all", "some", "none"] = "all"


# What came of a decision: a burst that ran and its drafts, or sequences that moved.
Outcome = Ran | Drafted | Relocated
