"""The trace of a rollout, burst by burst and move by move: a record to plot and store.

`DraftSums` compares the seconds that drafts were predicted to save with those that they saved.
Knows numbers and names. Does not know who measured them.
"""

import json
from dataclasses import asdict, dataclass, fields

from pat_jax.engine.sequences.prefill_calls import MovedBytes
from pat_jax.planning.types import BurstResult, Carry, DraftPrediction


@dataclass
class DraftSums:
    """Predicted and actual values, summed over the bursts whose drafts a planner has predicted.

    Both savings are relative to the time of steps without drafts, as the planner predicts it.
    """

    steps: int = 0
    expected_tokens: float = 0.0  # predicted tokens of a row in each step, summed over steps
    tokens: float = 0.0  # generated tokens of a row in each step, summed over steps
    predicted_saving_s: float = 0.0
    saving_s: float = 0.0

    def __add__(self, other: "DraftSums") -> "DraftSums":
        sums = (getattr(self, each.name) + getattr(other, each.name) for each in fields(self))
        return DraftSums(*sums)

    def add(self, burst: BurstResult, predicted: DraftPrediction, tokens: float) -> None:
        """Adds a burst in which a row generated `tokens` per step on average."""
        self.steps += burst.steps
        self.expected_tokens += burst.steps * predicted.tokens
        self.tokens += burst.steps * tokens
        self.predicted_saving_s += predicted.saved_s(burst.steps)
        self.saving_s += burst.steps * tokens * predicted.plain_s - burst.seconds

    @property
    def words(self) -> str:
        if not self.steps:
            return "no drafts were made: none was predicted to pay, or had room"
        return (
            f"drafts in {self.steps} steps: acceptance length {self.tokens / self.steps:.2f} "
            f"({self.expected_tokens / self.steps:.2f} predicted), saved {self.saving_s:.2f} s "
            f"({self.predicted_saving_s:.2f} predicted)"
        )


@dataclass(frozen=True)
class Move:
    """A move of running sequences to another layout or other replicas: predicted and actual."""

    step: int  # decode steps done before the move
    running: int  # unfinished sequences at the start of the move
    source: str  # layout, such as dp2tp1
    target: str  # layout; equal to `source` if only replicas change
    seconds: float  # actual cost
    predicted_saving_s: float  # until the end of decoding; for a switch, the cost is subtracted
    predicted_cost_s: float
    kv: Carry  # whether the KV cache migrated, was recomputed, or both ("mixed")
    reason: str
    sequences: int  # number of sequences that moved
    fullest: tuple[int, int]  # running sequences of the fullest replica, before and after
    sent: MovedBytes | None = None  # None in a replay, which sends nothing
    at_s: float = 0.0  # start of the move, in seconds since the rollout began
    predicted_remaining_s: float = 0.0  # from the start of the move to the end of the rollout

    @property
    def is_switch(self) -> bool:
        """Whether the layout changes."""
        return self.source != self.target

    @property
    def predicted_stay_s(self) -> float:
        """The predicted seconds to the end of the rollout without this move."""
        return self.predicted_remaining_s + self.predicted_saving_s


@dataclass(frozen=True)
class DraftTrace:
    """The drafts of a rollout: one entry for each burst; older traces have none."""

    tokens_per_step: tuple[float, ...] = ()  # mean tokens of a sequence in a step; 1 without drafts
    drafted: tuple[int, ...] = ()  # draft tokens verified
    accepted: tuple[int, ...] = ()  # draft tokens accepted
    # For each of `draft_counts.SOURCES`: tokens verified, accepted, and accepted on branches; zeros
    # if drafts are not copied.
    by_source: tuple[tuple[tuple[int, ...], ...], ...] = ()
    saving_s: float | None = None  # by bursts whose drafts were predicted; None: no such burst
    predicted_saving_s: float | None = None


@dataclass(frozen=True)
class RolloutTrace:
    """The course of a rollout: one entry for each burst, with values at its start.

    The last burst ends at `total_s` with no running sequence. Time between two bursts is spent on
    the host and on moves.
    """

    times_s: tuple[float, ...]  # start of each burst, in seconds since the rollout began
    steps: tuple[int, ...]  # decode steps done before each burst
    running: tuple[int, ...]  # unfinished sequences of all replicas at the start of each burst
    layout: tuple[str, ...]  # the layout of each burst
    total_s: float
    total_steps: int
    moves: tuple[Move, ...] = ()
    done_after: tuple[int, ...] = ()  # decode steps after which each sequence was done, ascending
    drafts: DraftTrace = DraftTrace()
    is_computed: bool = False  # replayed on a simulated clock: nothing ran

    def __post_init__(self):
        lengths = {len(self.times_s), len(self.steps), len(self.running), len(self.layout)}
        if len(lengths) > 1:
            raise ValueError(f"a trace needs one entry for each burst: got lengths {lengths}.")

    @property
    def switches(self) -> tuple[Move, ...]:
        """Moves to another layout."""
        return tuple(move for move in self.moves if move.is_switch)

    @property
    def path(self) -> list[str]:
        """The layouts in order of use; the first may have been left before a token was decoded."""
        switches = self.switches
        first = [switch.source for switch in switches[:1]] or list(self.layout[:1])
        return first + [switch.target for switch in switches]

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=1)
