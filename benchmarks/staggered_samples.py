"""Tokens per verification step where more responses are asked for than there are rows, by the order in which
they begin.

    python -m benchmarks.staggered_samples --data ../shared/data/speculation/dev.parquet \
        --out benchmarks/results/staggered_samples.json

Nothing is generated: the policy's choice is the recorded token, and rows verify in lockstep what the engine would
draft of seven tokens at most (`draft_acceptance`). A burst ends after `BURST` steps, or when an eighth of its rows has
ended while others wait; then free rows are given to those that wait, the prompts of the longest responses first:

    together   all samples of a prompt one behind the other, as they are asked for
    leaders    the first four of each prompt one after the other, then the others as above (`planning/planner/stagger.py`)
    all        every sample of each prompt one after the other

`tokens` are those of a row in a step, `steps` those of the lockstep until the last has ended, and `expected_saving` is
what the planner's schedule says of leaders, in % of the steps of single rows, knowing all lengths, beside what came.
With rows for all, "none waits"; `whole siblings` has what a row says that begins with so many ended siblings.
"""

import argparse
import json
import sys
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.draft_acceptance import SOURCES, groups_of
from benchmarks.draft_predictions import BURST
from pat_jax.engine.controller import REFILL_PART
from pat_jax.planning.planner.stagger import Queue, Schedule, staggered
from pat_jax.planning.types import Load
from pat_jax.profiling.simulate.draft_counting import Group, Record, Rules, _Lockstep

DRAFT = 7
BY_SOURCES = {
    name: replace(SOURCES[name], draft=DRAFT)
    for name in ("own, siblings as of launch", "own, siblings as of launch, earlier")
}
PARTS = 2, 4, 8  # of all responses one has a row
WHOLE = 1, 2, 4, 8


class Queued(_Lockstep):
    """Rows of which some wait: they have nothing to say yet."""

    def __init__(self, record: Record, rules: Rules, order: np.ndarray, rows: int):
        super().__init__(record, rules)
        self.waiting, self.rows = order, rows
        self.whole, self.stop = self.stop, self.at.copy()

    def launch(self) -> None:
        free = self.rows - self.live
        begin, self.waiting = self.waiting[:free], self.waiting[free:]
        self.stop[begin] = self.whole[begin]
        begun, self.stop = self.stop, self.whole
        super().launch()
        self.stop = begun

    def skip(self, rows: np.ndarray) -> None:
        """They have ended, without a step."""
        self.at[rows] = self.stop[rows] = self.whole[rows]

    @property
    def live(self) -> int:
        return int((self.at < self.stop).sum())

    def counted(self) -> tuple[int, int]:
        """Steps of rows, and of the lockstep."""
        row_steps = steps = 0
        while len(self.waiting) or self.live:
            self.launch()
            most = self.live
            for _ in range(BURST):
                live = self.live
                if not live or (len(self.waiting) and live <= most - -(-most // REFILL_PART)):
                    break
                self.step()
                row_steps, steps = row_steps + live, steps + 1
        return row_steps, steps


def queue_of(record: Record, lengths: np.ndarray, rows: int, *, has_earlier: bool) -> Queue:
    """All responses, the prompts of the longest first."""
    group = record.group[: record.rows]
    mean = np.bincount(group, lengths) / np.bincount(group)
    none = np.zeros(record.rows, int)
    load = Load(none, none, (record.said - record.start)[: record.rows], lengths)
    order = np.argsort(-mean[group], kind="stable")
    return Queue(load, order, group, np.full(record.rows, has_earlier), rows)


def orders(queue: Queue) -> Mapping[str, np.ndarray]:
    whole = len(queue.order)
    every = {"all": staggered(queue.order, queue.prompt, whole)}
    return {"together": queue.order, "leaders": queue.staggered, **every}


def of_set(groups: Sequence[Group], context: int) -> Iterator[tuple[str, dict]]:
    """By what is drafted from."""
    record = Record(groups, context)
    lengths = (record.stop - record.said)[: record.rows]
    tokens = int(lengths.sum())
    for name, rules in BY_SOURCES.items():
        if rules.earlier and not any(group.earlier for group in groups):
            continue
        every = queue_of(record, lengths, record.rows, has_earlier=rules.earlier)
        row_steps, steps = Queued(record, rules, every.order, record.rows).counted()
        alone = tokens / row_steps
        found: dict[str, Any] = {"none waits": {"tokens": round(alone, 3), "steps": steps}}
        for part in PARTS:
            rows = -(-record.rows // part)
            queue = replace(every, rows=rows)
            found[f"rows for 1/{part}"] = compared(record, rules, queue, lengths, alone - 1)
        found["whole siblings"] = by_whole(record, rules)
        yield name, found


def compared(
    record: Record, rules: Rules, queue: Queue, lengths: np.ndarray, right: float
) -> dict[str, Any]:
    """The orders of a queue, and what is expected of leaders."""
    tokens, found, row_steps = int(lengths.sum()), dict[str, Any](), dict[str, int]()
    for name, order in orders(queue).items():
        row_steps[name], steps = Queued(record, rules, order, queue.rows).counted()
        found[name] = {"tokens": round(tokens / row_steps[name], 3), "steps": steps}
    believed = {
        name: Schedule.of(queue, order, lengths, queue.rows, right).row_steps
        for name, order in orders(queue).items()
    }
    return found | {
        name: round(100 * (1 - steps["leaders"] / steps["together"]), 1)
        for name, steps in (("saving", row_steps), ("expected_saving", believed))
    }


def by_whole(record: Record, rules: Rules) -> dict[int, float]:
    """What rows of half the samples say in a step, by how many of the others have ended."""
    group = record.group[: record.rows]
    place = np.arange(record.rows) - np.searchsorted(group, group)
    samples = int(np.bincount(group).min())
    runs = np.flatnonzero(place >= np.bincount(group)[group] - max(1, samples // 2))
    tokens, found = int((record.stop - record.said)[runs].sum()), {}
    for whole in (0, *WHOLE):
        if whole <= samples - max(1, samples // 2):
            rows = Queued(record, rules, runs, record.rows)
            rows.skip(np.flatnonzero(place < whole))
            found[whole] = round(tokens / rows.counted()[0], 3)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--context", type=int, default=16, help="most tokens of a match")
    parser.add_argument("--samples", type=int, default=16, help="most samples of a prompt")
    parser.add_argument("--sets", nargs="+", help="only those whose names begin so")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    by_name: defaultdict[str, list[Group]] = defaultdict(list)
    for group in groups_of(args.data, args.samples):
        if not args.sets or group.name.startswith(tuple(args.sets)):
            by_name[group.name].append(group)
    found: dict[str, dict] = {}
    for name, groups in sorted(by_name.items()):
        sizes = {"prompts": len(groups), "responses": sum(len(g.responses) for g in groups)}
        found[name] = sizes
        for sources, counts in of_set(groups, args.context):
            found[name][sources] = counts
            print(name, sources, json.dumps(counts), flush=True)
    if args.out:
        command = "python -m benchmarks.staggered_samples " + " ".join(sys.argv[1:])
        rules = {"tokens of a draft": DRAFT, "steps of a burst": BURST}
        content = {"command": command, "rules": rules, **found}
        args.out.write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
