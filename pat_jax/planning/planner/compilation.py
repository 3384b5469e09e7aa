"""Layouts that are not compiled yet: what that would cost, and whether it would pay.

A plan cannot lead to one of them. The planner asks all the same what it would do if it could: with
the seconds of compiling spread over the iterations that are expected to profit, a layout on the
path is wanted, and somebody compiles it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import permutations
from typing import TYPE_CHECKING

import numpy as np

from pat_jax.planning.latency.model import ROUNDS, LatencyModel
from pat_jax.planning.planner.costs import LARGE_S
from pat_jax.planning.types import Split

if TYPE_CHECKING:
    from pat_jax.planning.planner.priced import Costs

RECENT = 0.8  # weight of the past in the share of rollouts that would have profited, per rollout
LEAST_ITERATIONS = 1e-3  # that profit: keeps the quotient finite


@dataclass
class Uncompiled:
    """The layouts that are not compiled, with the seconds that it would take."""

    compile_s: dict[Split, float]
    iterations_left: int  # of the run
    wanted: set[Split] = field(default_factory=set)  # some plan would have paid for them
    _needed: set[Split] = field(default_factory=set)  # in this rollout, had they cost nothing
    _share: dict[Split, float] = field(default_factory=dict)  # of recent rollouts that needed them

    def spread_s(self, split: Split) -> float:
        """Seconds of compiling for each iteration that is expected to profit; 0 if compiled."""
        profiting = self.iterations_left * self._share.get(split, 1.0)
        return self.compile_s.get(split, 0.0) / max(profiting, LEAST_ITERATIONS)

    def leave_out(
        self, costs: "Costs", here: int | None, safety: float, min_saving: float
    ) -> "Costs":
        """Prices without a way to what is not compiled; notes what a plan would have used of it.

        Args:
          here: the current layout, an index of `costs.tables.splits`; None before the rollout.
          safety, min_saving: as of the planner.
        """
        splits = costs.tables.splits
        is_missing = np.array([split in self.compile_s for split in splits])
        price = np.array([self.spread_s(split) for split in splits])
        compiled = _with_fee(costs, np.where(is_missing, LARGE_S, 0.0))
        _, free = _cheapest(costs, here, safety)
        # A plan counts the cost of a switch `safety` times; that of compiling is no prediction.
        total, paid = _cheapest(_with_fee(costs, price / safety), here, safety)
        without, _ = _cheapest(compiled, here, safety)
        self._needed |= self.compile_s.keys() & {splits[i] for i in free}
        if without - total > min_saving * without:
            self.wanted |= self.compile_s.keys() & {splits[i] for i in paid}
        return compiled

    def end_rollout(self, iterations_left: int) -> None:
        self.iterations_left = iterations_left
        for split in self.compile_s:
            old = self._share.get(split, 1.0)
            self._share[split] = RECENT * old + (1 - RECENT) * (split in self._needed)
        self._needed = set()

    def compiled(self, split: Split) -> None:
        del self.compile_s[split]
        self.wanted.discard(split)


def follow(choices: np.ndarray, start: int) -> np.ndarray:
    """The split to run in at each moment, int[moments], where `choices` lead from `start`.

    Args:
      choices: int[moments, from], the split that is best at each moment in each split.
    """
    path = np.empty(len(choices), int)
    for j, choice in enumerate(choices):
        start = path[j] = choice[start]
    return path


def _cheapest(costs: "Costs", here: int | None, safety: float) -> tuple[float, set[int]]:
    """The seconds of the cheapest path and the splits on it."""
    totals, choices = costs.cheapest(safety)
    if here is None:
        totals = totals + costs.prefill
        here = int(np.argmin(totals))
    return float(totals[here]), {here, *follow(choices, here)}


def _with_fee(costs: "Costs", fee: np.ndarray) -> "Costs":
    """With so many seconds more, float[to], for going or beginning there."""
    extra = np.where(np.eye(len(fee), dtype=bool), 0.0, fee)
    return replace(costs, switch=costs.switch + extra, prefill=costs.prefill + fee)


@dataclass(frozen=True)
class CompileTimes:
    """What is known of how long programs take to compile, in seconds."""

    profiled: Mapping[str, float]  # "decode dp2tp1": one program, from the profile
    seen: Mapping[tuple[str, Split], Sequence[float]]  # by kind and layout, in this run

    def estimate(self, programs: Mapping[tuple[str, Split], int]) -> float:
        """Seconds of that many programs of each kind and layout, on one thread."""
        return sum(count * self.one(*kind) for kind, count in programs.items())

    def one(self, name: str, split: Split) -> float:
        """The profile's time, corrected by what this run saw of the profiled kinds.

        A kind that no profile has takes what its like took in this run. Before anything was seen it
        takes what the quickest profiled kind does: those run the model, the others move data.
        """
        if profiled := self.profiled.get(f"{name} {split}"):
            return profiled * self._correction
        alike = [s for (kind, _), times in self.seen.items() if kind == name for s in times]
        if alike:
            return sum(alike) / len(alike)
        if self.profiled:
            return min(self.profiled.values()) * self._correction
        every = [s for times in self.seen.values() for s in times]
        return sum(every) / len(every) if every else 0.0

    @property
    def _correction(self) -> float:
        both = [
            (sum(times) / len(times), self.profiled[name])
            for (kind, split), times in self.seen.items()
            if (name := f"{kind} {split}") in self.profiled
        ]
        return sum(s for s, _ in both) / sum(p for _, p in both) if both else 1.0


def optimistic(
    latency: LatencyModel, rows: Mapping[Split, Sequence[int]], lengths: Sequence[int]
) -> LatencyModel:
    """`latency` with the best that a layout without any times could do.

    Of k times as many devices a model each reads and multiplies 1/k, at best in 1/k of the time that
    `latency` gives as many rows, and a switch there costs nothing. So a layout is tried unless it
    would not pay even then; once it was, its own times count.

    Args:
      rows: row buckets of a group, of all layouts.
      lengths: length buckets, tokens.
    """
    known = {key[0] for key in latency.decode_table}
    widest = max(known, key=lambda split: split.tp)
    decode, prefill = dict(latency.decode_table), dict(latency.prefill_table)
    verify = dict(latency.verify_table)
    for split in rows.keys() - known:
        share = min(1.0, widest.tp / split.tp)
        for length in lengths:
            prefill[(split, length)] = share * latency.prefill_call(widest, length)
            for n in rows[split]:
                decode[(split, n, length)] = share * latency.decode_step(widest, n, length)
                for budget in latency.budgets:
                    verifying = latency.verifying(budget)
                    if widest in verifying.decode and n <= verifying.decode[widest].rows[-1]:
                        seconds = share * verifying.decode_step(widest, n, length)
                        verify[(split, n, length, budget)] = seconds
    reslice, migrate = dict(latency.reslice_table), dict(latency.migrate_table)
    for pair in permutations(rows, 2):
        if pair not in reslice:
            reslice[pair] = 0.0
            migrate |= {(*pair, kind): 0.0 for kind in ROUNDS}
    return replace(
        latency,
        decode_table=decode,
        prefill_table=prefill,
        reslice_table=reslice,
        migrate_table=migrate,
        verify_table=verify,
    )
