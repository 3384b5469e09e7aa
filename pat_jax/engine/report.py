"""What a rollout did and what it cost, filled in while it runs.

Knows numbers and names. Does not know who measured them.
"""

import math
from dataclasses import dataclass, field, fields

import numpy as np

from pat_jax.common.stopwatch import Stopwatch
from pat_jax.engine.controller import Collected, Controller, Relocation
from pat_jax.engine.executor import Arrival
from pat_jax.engine.sequences.prefill_calls import PrefillWork
from pat_jax.engine.trace import Balanced, RolloutTrace, Switch
from pat_jax.planning.drafts import NO_SOURCES
from pat_jax.planning.types import Carry, DraftPrediction, Plan, Ran

MIB = 2**20


@dataclass
class DraftSums:
    """Of the bursts whose drafts a planner has priced: what it expected, and what came.

    What steps without drafts would have taken is what the planner believes.
    """

    steps: int = 0
    expected_tokens: float = 0.0  # of a row in each step, added up
    tokens: float = 0.0
    predicted_saving_s: float = 0.0
    saving_s: float = 0.0

    def __add__(self, other: "DraftSums") -> "DraftSums":
        sums = (getattr(self, each.name) + getattr(other, each.name) for each in fields(self))
        return DraftSums(*sums)

    def add(self, burst: Ran, predicted: DraftPrediction, tokens: float) -> None:
        """A burst in whose steps a row generated so many `tokens` each, on average."""
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
            f"drafts in {self.steps} steps: a sequence said {self.tokens / self.steps:.2f} tokens in each, "
            f"expected were {self.expected_tokens / self.steps:.2f}; saved {self.saving_s:.2f} s, "
            f"expected were {self.predicted_saving_s:.2f}"
        )


@dataclass
class RolloutReport:
    """What a rollout did and what it cost, in seconds, tokens and switches."""

    tokens: int = 0
    decode_steps: int = 0
    busy_rows: int = 0  # rows x steps that sampled a token, or several
    total_rows: int = 0  # rows x steps that ran
    prefill_tokens: int = 0
    prefill_room: int = 0  # tokens that the calls had room for
    # Room without a token, as part of what live sequences' pages have room for, averaged over the
    # beginnings and ends of bursts. Pages laid out to be drawn are free.
    kv_waste: float = math.nan
    preempted: int = 0  # times that a sequence gave up its pages, to be recomputed
    expected: np.ndarray | None = None  # float[sequences], tokens of the responses, as was believed
    seconds: dict[str, float] = field(default_factory=dict)
    times_s: list[float] = field(default_factory=list)
    total_s: float = 0.0
    compile_s: float = 0.0  # waited for programs that were needed, beside `total_s`
    steps: list[int] = field(default_factory=list)
    live: list[int] = field(default_factory=list)
    done_after: list[int] = field(default_factory=list)  # decode steps of each sequence
    layouts: list[str] = field(default_factory=list)
    switches: list[Switch] = field(default_factory=list)
    balanced: list[Balanced] = field(default_factory=list)
    bursts: list[Ran] = field(default_factory=list)
    tokens_per_step: list[float] = field(default_factory=list)  # of a row, in each burst
    drafted_in: list[int] = field(
        default_factory=list
    )  # tokens of drafts that each burst has verified
    accepted_in: list[int] = field(default_factory=list)  # and of these, those that were said
    # Of each burst: both, and those said on a branch, of drafts that are copied, by what they are copied from.
    by_source_in: list[list[list[int]]] = field(default_factory=list)
    drafts: DraftSums = field(default_factory=DraftSums)
    first_plan: str = ""  # where the planner went first, and why
    is_computed: bool = False  # see RolloutTrace

    def add_burst(
        self, burst: Ran, began_s: float, done: Collected, predicted: DraftPrediction | None
    ) -> None:
        """A burst that began then, what came of it, and what was predicted of its drafts."""
        tokens_per_step = done.tokens / max(1, done.live_steps)
        self.times_s.append(began_s)
        self.steps.append(self.decode_steps)
        self.live.append(burst.live)
        self.layouts.append(str(burst.split))
        self.bursts.append(burst)
        self.tokens += done.tokens
        self.decode_steps += burst.steps
        self.tokens_per_step.append(tokens_per_step)
        self.busy_rows += done.live_steps
        self.drafted_in.append(done.drafted.verified)
        self.accepted_in.append(done.tokens - done.live_steps)
        self.by_source_in.append(done.drafted.by_source.tolist())
        self.total_rows += burst.steps * burst.rows * burst.split.dp
        if predicted is not None:
            self.drafts.add(burst, predicted, tokens_per_step)

    def add_switch(
        self,
        plan: Plan,
        relocation: Relocation,
        arrival: Arrival,
        seconds: float,
        carry: Carry,
        began_s: float,
    ) -> None:
        switch = Switch(
            step=self.decode_steps,
            live=relocation.load.live,
            source=str(relocation.source),
            target=str(relocation.target),
            kv=carry,
            bytes_moved=arrival.num_bytes,
            least_bytes=arrival.least_bytes,
            extra_bytes=arrival.extra_bytes,
            seconds=seconds,
            predicted_saving_s=plan.predicted_saving_s,
            predicted_cost_s=plan.predicted_cost_s,
            reason=plan.reason,
            recompute_below=plan.recompute_below,
            at_s=began_s,
            predicted_remaining_s=plan.predicted_remaining_s,
        )
        self.switches.append(switch)

    def add_balance(
        self,
        plan: Plan,
        relocation: Relocation,
        arrival: Arrival,
        seconds: float,
        fullest: tuple[int, int],
    ) -> None:
        """
        Args:
          fullest: live sequences of the fullest group, before and after.
        """
        moved = Balanced(
            step=self.decode_steps,
            layout=str(relocation.source),
            sequences=int((relocation.group != relocation.load.group).sum()),
            pages=len(relocation.moves.old_page),
            fullest=fullest,
            seconds=seconds,
            predicted_saving_s=plan.predicted_saving_s,
            predicted_cost_s=plan.predicted_cost_s,
            bytes_moved=arrival.num_bytes or 0,
            least_bytes=arrival.least_bytes,
        )
        self.balanced.append(moved)

    @property
    def tokens_per_s(self) -> float:
        """NaN where nothing was generated, as where all was on disk; so are the shares below."""
        return _ratio(self.tokens, self.total_s)

    @property
    def drafted(self) -> int:
        """Tokens of drafts that were verified."""
        return sum(self.drafted_in)

    @property
    def accepted(self) -> int:
        """And of these, those that were said."""
        return sum(self.accepted_in)

    @property
    def by_source(self) -> list[list[int]]:
        """Both, and those said on a branch, of drafts that are copied, by what they are copied from."""
        return sum((np.array(one) for one in self.by_source_in), NO_SOURCES).tolist()

    @property
    def tokens_per_row_step(self) -> float:
        """What a sequence says in a decode step, on average; 1 where nothing is drafted."""
        return _ratio(self.tokens, self.busy_rows)

    @property
    def row_occupancy(self) -> float:
        """Part of the rows x steps that sampled a token."""
        return _ratio(self.busy_rows, self.total_rows)

    @property
    def balance_share(self) -> float:
        """Part of the rollout's seconds in which sequences moved between groups of a layout."""
        return _ratio(self.spent("balance"), self.total_s)

    @property
    def prefill_padding(self) -> float:
        """Part of the computed tokens that were none."""
        return 1 - _ratio(self.prefill_tokens, self.prefill_room)

    def add_prefill(self, work: PrefillWork, room: int) -> None:
        """A prefill whose calls had room for so many tokens."""
        self.prefill_tokens += int((work.spans.stop - work.spans.start).sum())
        self.prefill_room += room

    def finish(self, controller: Controller, clock: Stopwatch) -> None:
        """When the last sequence has ended."""
        self.preempted = controller.num_preempted
        self.kv_waste = _ratio(controller.kv_unused, controller.kv_slots)
        self.total_s, self.seconds = clock.elapsed, clock.seconds
        self.done_after = np.sort(controller.table.done_after).tolist()

    def spent(self, *stages: str) -> float:
        """Seconds of some stages together: `rollout.rollout` names them."""
        return sum(self.seconds.get(stage, 0.0) for stage in stages)

    @property
    def trace(self) -> RolloutTrace:
        return RolloutTrace(
            times_s=tuple(self.times_s),
            steps=tuple(self.steps),
            live=tuple(self.live),
            done_after=tuple(self.done_after),
            tokens_per_step=tuple(self.tokens_per_step),
            drafted=tuple(self.drafted_in),
            accepted=tuple(self.accepted_in),
            by_source=tuple(tuple(map(tuple, one)) for one in self.by_source_in),
            draft_saving_s=self.drafts.saving_s if self.drafts.steps else None,
            predicted_draft_saving_s=(
                self.drafts.predicted_saving_s if self.drafts.steps else None
            ),
            layout=tuple(self.layouts),
            total_s=self.total_s,
            total_steps=self.decode_steps,
            switches=tuple(self.switches),
            balanced=tuple(self.balanced),
            is_computed=self.is_computed,
        )


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole else math.nan


def describe_balance(report: RolloutReport) -> str:
    """All moves between groups, when the rollout has ended."""
    moves = report.balanced
    return (
        f"balance: {sum(move.sequences for move in moves)} sequences moved between groups in "
        f"{len(moves)} moves, {100 * report.balance_share:.2f} % of the rollout's time; "
        f"{sum(move.predicted_saving_s for move in moves):.2f} s were to be saved"
    )


def describe_switch(switch: Switch, total_s: float) -> str:
    """What was predicted of a switch and what came of it, when the rollout has ended."""
    text = (
        f"switch {switch.source} to {switch.target} cost {switch.seconds:.3f} s "
        f"({switch.predicted_cost_s:.3f} predicted), moved {(switch.bytes_moved or 0) / MIB:.1f} MiB "
        f"({switch.least_bytes / MIB:.1f} at least), held {switch.extra_bytes / MIB:.1f} MiB more on a "
        f"device, {total_s - switch.at_s:.3f} s to the end"
    )
    if not switch.predicted_remaining_s:  # scripted
        return text
    return (
        f"{text} ({switch.predicted_remaining_s:.3f} predicted, "
        f"{switch.predicted_stay_s:.3f} had it stayed)"
    )
