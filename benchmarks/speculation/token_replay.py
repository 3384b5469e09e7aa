"""Rollouts with drafts on 8xH100, replayed token by token: every sequence has a recorded text of its own.

    python -m benchmarks.speculation.token_replay --data ../shared/data \
        --out benchmarks/results/token_replay.json

The grid of `speculation_replay`, and its two truths. There a sequence gets in each step what is expected of
one of eight classes of recorded responses, which narrows their spread. Here it goes through one recorded
response: at each of its tokens a step finds the match that the engine would find there, verifies as many
draft tokens as the planner's belief and the step's room allow (`engine/device/token_batch.py`), and
goes on by those that the record has, and one more. The longest response is that of the longest sequence, and
so on; a text that is shorter than its sequence begins again. Texts of siblings are as they were at most 64
tokens ago. Nothing ran on a GPU: steps are composed from kernel times.

    speed-up    time of the best static layout without drafts, chosen afterwards for each replay / time
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np

from benchmarks.planner.kernel_tables import SPLITS
from benchmarks.report import in_processes, write
from benchmarks.speculation import draft_counting
from benchmarks.speculation.draft_acceptance import BURST, ROOM
from benchmarks.speculation.recorded_drafts import SETS, drawn, groups_named
from benchmarks.speculation.speculation_cells import DRAFTS, Cell, grid, replay_options
from pat_jax.engine.device.ngram import CONTEXT
from pat_jax.engine.executor import Burst
from pat_jax.planning.draft_counts import (
    BRANCHES,
    KINDS,
    MATCH_BIN_EDGES,
    MAX_RUN,
    NO_SOURCES,
    DraftResult,
)
from pat_jax.planning.drafts import Acceptance
from pat_jax.planning.planner.planner import CostModelPlanner
from pat_jax.profiling.simulate import simulator
from pat_jax.profiling.simulate.drafted import DraftedRows

MOST = DRAFTS.longest  # tokens of a draft
LAUNCHES = 2 * BURST  # tokens between two: a burst's steps generate about twice as many
OF_DRAFT = np.arange(MOST)


@dataclass(frozen=True)
class Texts:
    """At each token of some responses: the match before it, the tokens of its draft that are right, and
    the same of a branch; int[tokens] of all responses, one after the other."""

    start: np.ndarray  # int[responses]
    length: np.ndarray  # int[responses]
    matched: np.ndarray
    right: np.ndarray
    beside: np.ndarray
    branched: np.ndarray

    @classmethod
    def of(cls, groups: Sequence[draft_counting.Group]) -> "Texts":
        rules = draft_counting.Rules(True, False, MOST, MOST, burst=BURST, room=ROOM)
        record = draft_counting.Record(groups, CONTEXT)
        rows = _TokenByToken(record, rules)
        start = record.known_tokens[: record.rows]
        length = record.stop[: record.rows] - start
        found, step = np.zeros((4, len(record.tokens)), np.int64), 0
        while np.any(rows.at < rows.stop):
            if step % LAUNCHES == 0:
                rows.launch()
            row, *at_row = rows.step()
            found[:, rows.at[row] - 1] = at_row
            step += 1
        return cls(start, length, *found)


class _TokenByToken(draft_counting._Lockstep):
    def _accepted(self, row: np.ndarray, matched: np.ndarray, place: np.ndarray) -> np.ndarray:
        self.seen.append(super()._accepted(row, matched, place))
        return np.zeros_like(row)  # go on by one token

    def step(self) -> tuple[np.ndarray, ...]:
        self.seen: list[np.ndarray] = []
        row, matched, _, beside, _ = super().step()
        right, branched = self.seen
        return row, matched, right, beside, branched


@cache
def texts(data: Path, name: str) -> Texts:
    return Texts.of(groups_named(data, name))


class TokenRows(DraftedRows):
    """Rows that go through a recorded text each, in place of what is expected of them."""

    def __init__(self, *args: Any, texts: Texts, of: np.ndarray):
        """`of`: the response of each sequence."""
        super().__init__(*args)
        self.texts, self.of = texts, of
        # Of each sequence, left by its last step: see `token_batch.left_by`.
        self.kind, self.place, self.goes_on = np.zeros((3, len(self.table)), np.int64)

    def _begin(self, burst: Burst) -> None:
        self.burst, self.counts = burst, Counts()

    def _advance(
        self, generated: np.ndarray, left: np.ndarray, of_replica: np.ndarray, steps: int
    ) -> tuple[np.ndarray, np.ndarray]:
        table, running = self.table, self.table.running
        before = table.length[running] - table.prompt_length[running]
        new, took = np.zeros((2, len(left)), np.int64)
        for _ in range(steps):
            live = np.flatnonzero(generated + new < left)
            rows = running[live]
            right = self._step(rows, table.replica(rows), (before + generated + new)[live])
            new[live] += np.minimum(right, (left - generated - new)[live])
            took[live] += 1
        return new, took

    def _counted(self, generated: np.ndarray) -> DraftResult:
        return self.counts.result()

    def _step(self, rows: np.ndarray, replica: np.ndarray, token: np.ndarray) -> np.ndarray:
        """Tokens of each row, int[rows]."""
        texts, of, burst, counts = self.texts, self.of[rows], self.burst, self.counts
        believed = burst.accept_prob
        assert believed is not None
        at = texts.start[of] + token % texts.length[of]
        matched, right, beside, branched = (
            x[at] for x in (texts.matched, texts.right, texts.beside, texts.branched)
        )
        is_old = (self.goes_on[rows] > 0) & (matched >= self.goes_on[rows])
        kind = np.where(is_old, self.kind[rows], kind_of(matched))
        place = np.where(is_old, np.minimum(self.place[rows], MAX_RUN - MOST), 0)
        value = worth(believed, kind, place, matched > 0, kind_of(beside))
        room = burst.shape[1] * (1 + burst.shape.num_draft_tokens)
        draft, branch = chosen(value, replica, room)
        accepted = np.minimum(right, draft)
        on_branch = np.where(right == 0, np.minimum(branched, branch), 0)
        last = self.place[rows], self.goes_on[rows] > 0, self.kind[rows]
        counts.add(kind, place, is_old, last, draft, accepted)
        counts.add_branches(kind, matched > 0, kind_of(beside), right == 0, branch, branched)
        may_go_on = (matched > 0) & (accepted == draft) & (on_branch == 0)
        self.kind[rows], self.place[rows] = kind, place + draft + 1
        self.goes_on[rows] = np.where(may_go_on, np.minimum(matched + draft + 1, CONTEXT), 0)
        return 1 + accepted + on_branch


def kind_of(matched: np.ndarray) -> np.ndarray:
    return np.searchsorted(MATCH_BIN_EDGES, matched, side="right")


def worth(
    believed: np.ndarray,
    kind: np.ndarray,
    place: np.ndarray,
    has_draft: np.ndarray,
    own: np.ndarray,
) -> np.ndarray:
    """The probability by which each token of a draft, and of the branch beside it, is verified."""
    of_run = believed[0, kind[:, None], place[:, None] + 1 + OF_DRAFT]
    of_draft = of_run / np.maximum(believed[0, kind, place], 1e-30)[:, None]
    of_branch = (1 - of_draft[:, :1]) * believed[BRANCHES, own[:, None], 1 + OF_DRAFT]
    of_draft = np.where(has_draft[:, None], of_draft, 0.0)
    value = np.hstack([of_draft, np.where((own > 0)[:, None], of_branch, 0.0)])
    rank = np.argsort(np.argsort(-value, axis=1, kind="stable"), axis=1)
    return np.where(rank < MOST, value, 0.0)


def chosen(value: np.ndarray, replica: np.ndarray, room: int) -> tuple[np.ndarray, np.ndarray]:
    """Tokens verified of each row's draft and branch: the best of a replica have room."""
    group = np.repeat(replica, value.shape[1])
    order = np.lexsort((-value.ravel(), group))
    first = np.searchsorted(group[order], np.arange(replica.max(initial=0) + 1))
    rank = np.empty(len(order), np.int64)
    rank[order] = np.arange(len(order)) - first[group[order]]
    has_room = rank < (room - np.bincount(replica))[group]
    taken = has_room.reshape(value.shape) & (value > 0)
    return taken[:, :MOST].sum(axis=1), taken[:, MOST:].sum(axis=1)


class Counts:
    """What a burst counts, as `token_batch.Counts`."""

    def __init__(self):
        self.begun = np.zeros(KINDS, np.int64)
        self.proposed, self.accepted = np.zeros((2, 2, KINDS, MAX_RUN), np.int64)
        self.beside, self.verified = np.zeros((KINDS, KINDS), np.int64), 0

    def add(self, kind, place, is_old, last, draft, accepted) -> None:
        np.add.at(self.begun, kind, ~is_old)
        before, was_there, its_kind = last
        at = 0, its_kind, np.clip(before, 1, MAX_RUN) - 1
        np.add.at(self.proposed, at, was_there)
        np.add.at(self.accepted, at, was_there & is_old)
        came = (draft[:, None] > OF_DRAFT) & (accepted[:, None] >= OF_DRAFT)
        at = 0, kind[:, None], place[:, None] + OF_DRAFT
        np.add.at(self.proposed, at, came)
        np.add.at(self.accepted, at, came & (accepted[:, None] > OF_DRAFT))
        self.verified += int(draft.sum())

    def add_branches(self, kind, has_draft, own, is_wrong, branch, right) -> None:
        np.add.at(self.beside, (kind, own), has_draft)
        is_there = (has_draft & (own > 0) & is_wrong)[:, None]
        verified, right = np.maximum(branch, 1)[:, None], right[:, None]
        came = is_there & (verified > OF_DRAFT) & (right >= OF_DRAFT)
        at = BRANCHES, own[:, None], 0 * own[:, None] + OF_DRAFT
        np.add.at(self.proposed, at, came)
        np.add.at(self.accepted, at, came & (right > OF_DRAFT))
        self.verified += int(branch.sum())

    def result(self) -> DraftResult:
        parts = self.begun, self.proposed, self.accepted, self.beside, np.array(self.verified)
        return DraftResult(*(x[None] for x in (*parts, NO_SOURCES)))


def run_cell(cell: Cell, replays: int, truths: Sequence[str]) -> dict[str, dict[str, list[float]]]:
    """Of each truth: the speed-up of each replay, and tokens of a step."""
    found: dict[str, dict[str, list[float]]] = {
        name: {"speed_up": [], "tokens": []} for name in truths
    }
    machine, lengths = cell.machine(), cell.known.fitted()
    for seed in range(replays):
        workload = cell.known.sample(cell.size, seed)
        best_s = min(
            simulator.replay(
                workload, CostModelPlanner((x,), machine.truth, lengths), machine
            ).total_s
            for x in SPLITS
        )
        for name in truths:
            known = texts(cell.data, name)
            limits = {"acceptance": Acceptance.unseen(), "drafts": machine.drafts.limits}
            planner = CostModelPlanner(SPLITS, machine.truth, lengths, **limits)
            rows = partial(TokenRows, texts=known, of=drawn(known.length, workload, seed))
            with patch.object(simulator, "DraftedRows", rows):
                run = simulator.replay(workload, planner, machine)
            found[name]["speed_up"].append(best_s / run.total_s)
            found[name]["tokens"].append(run.tokens_per_row_step)
    return found


def of_all(values: Sequence[float]) -> dict[str, float]:
    numbers = {"mean": np.mean(values), "min": np.min(values), "max": np.max(values)}
    return {name: round(float(value), 3) for name, value in numbers.items()}


def main() -> None:
    parser = replay_options(__doc__)
    parser.add_argument("--truths", nargs="+", choices=SETS, default=list(SETS))
    args = parser.parse_args()
    cells = grid(args)
    results = dict(
        in_processes(run_cell, cells, args.replays, args.truths, processes=args.processes)
    )
    groups = {"all": cells}
    for cell in cells:
        groups.setdefault(f"{cell.size} responses, {cell.lengths}", []).append(cell)
    speed_up = {
        name: {
            group: of_all([x for cell in some for x in results[cell][name]["speed_up"]])
            for group, some in groups.items()
        }
        for name in args.truths
    }
    for name, table in speed_up.items():
        for group, one in table.items():
            print(f"{name}, {group}: {one}")
    content = {"what": (__doc__ or "").split("\n\n", 2)[2], "replays_per_cell": args.replays}
    of_cells = {str(cell): found for cell, found in results.items()}
    write(args.out, {**content, "speed_up": speed_up, "cells": of_cells})


if __name__ == "__main__":
    main()
