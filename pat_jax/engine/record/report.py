"""The report of a rollout: what it did and what it cost, filled in while it runs.

Knows numbers and names. Does not know who measured them.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from pat_jax.common.stopwatch import Stopwatch
from pat_jax.engine.executor import Arrival, Collected, Relocation
from pat_jax.engine.record.trace import DraftSums, DraftTrace, Move, RolloutTrace
from pat_jax.engine.scheduler import Scheduler
from pat_jax.engine.sequences.prefill_calls import MovedBytes, PrefillWork
from pat_jax.planning.draft_counts import NO_SOURCES
from pat_jax.planning.types import BurstResult, Carry, DraftPrediction, Plan

MIB = 2**20


@dataclass(frozen=True, kw_only=True)
class BurstRecord(BurstResult):
    """The result of a burst and its place in the rollout."""

    began_s: float  # start of the burst, in seconds since the rollout began
    step: int  # decode steps before the burst
    tokens: int  # generated tokens
    row_steps: int  # steps in which each row ran, summed over rows; each generated 1 token or more
    drafted: int = 0  # draft tokens verified
    # For each of `draft_counts.SOURCES`: draft tokens verified, accepted, and accepted on branches.
    by_source: tuple[tuple[int, ...], ...] = ()

    @property
    def accepted(self) -> int:
        """The number of accepted draft tokens in the burst."""
        return self.tokens - self.row_steps

    @property
    def tokens_per_step(self) -> float:
        """Mean number of tokens that a row generates in a step."""
        return self.tokens / max(1, self.row_steps)


@dataclass
class RolloutReport:
    """The bursts, moves, tokens and seconds of a rollout."""

    bursts: list[BurstRecord] = field(default_factory=list)
    moves: list[Move] = field(default_factory=list)
    drafts: DraftSums = field(default_factory=DraftSums)
    prefill_tokens: int = 0
    prefill_room: int = 0  # tokens that prefill calls had room for, padding included
    # Unused share of the tokens that running sequences' pages have room for, averaged over the
    # starts and ends of bursts. Reserved pages count as free.
    kv_waste: float = math.nan
    preempted: int = 0  # how often a sequence was preempted
    seconds: dict[str, float] = field(default_factory=dict)  # by stage of the loop in `rollout.py`
    total_s: float = 0.0
    compile_s: float = 0.0  # spent waiting for programs to compile, not part of `total_s`
    done_after: list[int] = field(default_factory=list)  # steps until each sequence ended, sorted
    first_plan: str = ""  # the planner's first plan and its reason
    is_computed: bool = False  # see RolloutTrace

    def add_burst(
        self, ran: BurstResult, began_s: float, done: Collected, predicted: DraftPrediction | None
    ) -> None:
        """Adds a burst: its times, its start, its result, and what was predicted of its drafts."""
        burst = BurstRecord(
            **vars(ran),
            began_s=began_s,
            step=self.decode_steps,
            tokens=done.tokens,
            row_steps=done.running_steps,
            drafted=int(done.drafted.verified),
            by_source=tuple(map(tuple, done.drafted.by_source.tolist())),
        )
        self.bursts.append(burst)
        if predicted is not None:
            self.drafts.add(ran, predicted, burst.tokens_per_step)

    def add_move(
        self,
        plan: Plan,
        relocation: Relocation,
        arrival: Arrival,
        carry: Carry,
        fullest: tuple[int, int],
        began_s: float,
        seconds: float,
    ) -> None:
        """Adds a move.

        Args:
          carry: whether the KV cache migrated, was recomputed, or both ("mixed").
          fullest: running sequences of the fullest replica, before and after the move.
        """
        load = relocation.load
        is_switch = relocation.source != relocation.target
        moved = load.running if is_switch else int((relocation.replica != load.replica).sum())
        move = Move(
            step=self.decode_steps,
            running=load.running,
            source=str(relocation.source),
            target=str(relocation.target),
            seconds=seconds,
            predicted_saving_s=plan.predicted_saving_s,
            predicted_cost_s=plan.predicted_cost_s,
            kv=carry,
            reason=plan.reason,
            sequences=moved,
            fullest=fullest,
            sent=arrival.sent,
            at_s=began_s,
            predicted_remaining_s=plan.predicted_remaining_s,
        )
        self.moves.append(move)

    @property
    def switches(self) -> list[Move]:
        """Moves to another layout."""
        return [move for move in self.moves if move.is_switch]

    @property
    def balanced(self) -> list[Move]:
        """Moves between the replicas of a layout."""
        return [move for move in self.moves if not move.is_switch]

    @property
    def decode_steps(self) -> int:
        return self.bursts[-1].step + self.bursts[-1].steps if self.bursts else 0

    @property
    def tokens(self) -> int:
        return sum(burst.tokens for burst in self.bursts)

    @property
    def busy_rows(self) -> int:
        """The number of row-steps (steps, counted for each row) in which a row generated tokens."""
        return sum(burst.row_steps for burst in self.bursts)

    @property
    def total_rows(self) -> int:
        """The row-steps of all rows, including empty rows and rows whose sequence has ended."""
        return sum(burst.steps * burst.rows * burst.split.dp for burst in self.bursts)

    @property
    def tokens_per_s(self) -> float:
        """Generated tokens per second; NaN in a rollout that took no time."""
        return _ratio(self.tokens, self.total_s)

    @property
    def drafted(self) -> int:
        """The number of verified draft tokens."""
        return sum(burst.drafted for burst in self.bursts)

    @property
    def accepted(self) -> int:
        """The number of accepted draft tokens."""
        return sum(burst.accepted for burst in self.bursts)

    @property
    def by_source(self) -> list[list[int]]:
        """`BurstRecord.by_source` summed over all bursts."""
        return sum((np.array(burst.by_source) for burst in self.bursts), NO_SOURCES).tolist()

    @property
    def tokens_per_row_step(self) -> float:
        """Mean number of tokens of a sequence per decode step; 1 without drafts."""
        return _ratio(self.tokens, self.busy_rows)

    @property
    def row_occupancy(self) -> float:
        """Share of the row-steps in which a row generated a token."""
        return _ratio(self.busy_rows, self.total_rows)

    @property
    def balance_share(self) -> float:
        """Share of the rollout's seconds spent on moves between replicas of a layout."""
        return _ratio(self.spent("balance"), self.total_s)

    @property
    def prefill_padding(self) -> float:
        """Share of prefilled tokens that were padding."""
        return 1 - _ratio(self.prefill_tokens, self.prefill_room)

    def add_prefill(self, work: PrefillWork, room: int) -> None:
        """Adds a prefill whose calls had room for `room` tokens."""
        self.prefill_tokens += int((work.spans.stop - work.spans.start).sum())
        self.prefill_room += room

    def finish(self, scheduler: Scheduler, clock: Stopwatch) -> None:
        """Adds the totals after the last sequence has ended."""
        self.preempted = scheduler.num_preempted
        self.kv_waste = _ratio(scheduler.kv_unused, scheduler.kv_slots)
        self.total_s = clock.elapsed
        self.seconds = clock.seconds
        self.done_after = np.sort(scheduler.table.done_after).tolist()

    def spent(self, *stages: str) -> float:
        """Returns the sum of the seconds of some stages; `rollout.rollout` names the stages."""
        return sum(self.seconds.get(stage, 0.0) for stage in stages)

    @property
    def trace(self) -> RolloutTrace:
        bursts = self.bursts
        sums = self.drafts
        drafts = DraftTrace(
            tokens_per_step=tuple(burst.tokens_per_step for burst in bursts),
            drafted=tuple(burst.drafted for burst in bursts),
            accepted=tuple(burst.accepted for burst in bursts),
            by_source=tuple(burst.by_source for burst in bursts),
            saving_s=sums.saving_s if sums.steps else None,
            predicted_saving_s=sums.predicted_saving_s if sums.steps else None,
        )
        return RolloutTrace(
            times_s=tuple(burst.began_s for burst in bursts),
            steps=tuple(burst.step for burst in bursts),
            running=tuple(burst.running for burst in bursts),
            layout=tuple(str(burst.split) for burst in bursts),
            total_s=self.total_s,
            total_steps=self.decode_steps,
            moves=tuple(self.moves),
            done_after=tuple(self.done_after),
            drafts=drafts,
            is_computed=self.is_computed,
        )

    @property
    def words(self) -> Iterator[str]:
        """Sentences that compare predictions with the result of a rollout that has ended."""
        for switch in self.switches:
            yield _describe_switch(switch, self.total_s)
        if moves := self.balanced:
            yield (
                f"balance: {sum(move.sequences for move in moves)} sequences moved between replicas in "
                f"{len(moves)} moves, {100 * self.balance_share:.2f} % of the rollout's time; "
                f"{sum(move.predicted_saving_s for move in moves):.2f} s were to be saved"
            )
        if self.drafts.steps:
            yield self.drafts.words


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole else math.nan


def _describe_switch(switch: Move, total_s: float) -> str:
    sent = switch.sent or MovedBytes()
    text = (
        f"switch {switch.source} to {switch.target} cost {switch.seconds:.3f} s "
        f"({switch.predicted_cost_s:.3f} predicted), moved {sent.total / MIB:.1f} MiB "
        f"({sent.least / MIB:.1f} at least), held {sent.extra / MIB:.1f} MiB more on a "
        f"device, {total_s - switch.at_s:.3f} s to the end"
    )
    if not switch.predicted_remaining_s:  # scripted
        return text
    return (
        f"{text} ({switch.predicted_remaining_s:.3f} predicted, "
        f"{switch.predicted_stay_s:.3f} had it stayed)"
    )
