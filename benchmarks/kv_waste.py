"""KV memory that is held and not used, on real response lengths; no device computes anything.

    python -m benchmarks.kv_waste --data ../shared/data --out benchmarks/results/kv_waste.json

A rollout of `--sequences` responses, eight to a prompt, in eight data-parallel groups. Who holds which
page is decided by the engine's own controller, and rows draw pages by the function that devices run
(`engine/device/page_append.py`). Two ways, in pools that hold everything at once and in pools that hold a tenth:

  drawn    pages for the steps up to the device's next test, as in the engine
  whole    pages for a whole burst when it begins

Reported are parts of all tokens that the pages held have room for, a page of several samples counted
once: room of live sequences without a token when a burst begins, averaged over all decode steps, and
when a burst ends; and, when a burst ends, pages of sequences that ended in it. Beside them decode steps
and bursts of the rollout, how often a sequence gave way, and tokens prefilled. All are means over
`--draws` draws of the responses, which the order of the long ones needs.
"""

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.workloads import LengthData, free_of_charge, read
from pat_jax.config.rollout import RolloutConfig
from pat_jax.engine.controller import Burst, Controller
from pat_jax.engine.device.page_append import added, draw, lacking, num_held
from pat_jax.engine.layout.buckets import Shapes
from pat_jax.engine.report import RolloutReport
from pat_jax.engine.rollout import rollout
from pat_jax.engine.sequences.block_tables import BlockTables
from pat_jax.engine.sequences.contents import Contents
from pat_jax.engine.sequences.page_allocator import num_pages_for
from pat_jax.engine.sequences.sequence_table import SequenceTable
from pat_jax.engine.sequences.state import RowState
from pat_jax.planning.drafts import NONE_DRAFTED
from pat_jax.planning.planner.scripts import FixedLayout
from pat_jax.planning.types import Split
from pat_jax.profiling.simulate.machine import Machine
from pat_jax.profiling.simulate.simulated_executor import SimulatedExecutor, SimulatedOutput

SAMPLES, GROUPS = 8, 8
SPLIT = Split(GROUPS, 1)
CONFIG = RolloutConfig()
PAGE, CHECK, BURST = CONFIG.page_size, CONFIG.check_every, CONFIG.burst_steps
WAYS = {"drawn": CHECK, "whole": BURST}  # tokens to have pages for when a burst begins
POOLS = {"all": 1.0, "tenth": 0.1}  # parts of the pages that all sequences have at their ends


def _by_group(function: Callable) -> Callable:
    """Of arrays whose first dimension is the rows of all groups, or the groups."""

    def split(x: jax.Array) -> jax.Array:
        return jnp.reshape(x, (GROUPS, -1, *x.shape[1:]))

    def run(rows, tables, pages, drawn):
        outs = jax.vmap(function)(jax.tree.map(split, rows), split(tables), pages, drawn)
        return [jnp.reshape(x, (-1, *x.shape[2:])) if x.ndim > 1 else x for x in outs]

    return jax.jit(run)


@_by_group
def take(rows, tables, ring, drawn):
    """Tables after the draw, the number drawn then, and tokens that live rows hold and do not use,
    averaged over the steps up to the next test."""
    more = lacking(rows, tables, steps=CHECK, page_size=PAGE)
    tables, drawn = draw(tables, more, ring, drawn, most=num_pages_for(CHECK, PAGE))
    filled = jnp.minimum(rows.position + (CHECK - 1) / 2, rows.end - 1)
    unused = jnp.where(rows.live, num_held(tables) * PAGE - filled, 0)
    return tables, drawn, jnp.sum(unused)


class Draws(SimulatedExecutor):
    """Responses are as long as is known; rows draw their pages as those of devices do."""

    def __init__(self, responses: np.ndarray, machine: Machine, tables: BlockTables):
        super().__init__(responses, machine, tables, SPLIT)
        self.held: dict[str, int] = dict.fromkeys(("begin", "within", "end"), 0)
        self.unused: dict[str, float] = dict.fromkeys(self.held, 0.0)
        self.num_ended = 0  # pages, of the sequences that a burst ends
        self._num_held = 0

    def _note(self, when: str, unused: float) -> None:
        self.held[when] += self._num_held
        self.unused[when] += unused

    def launch(self, burst: Burst) -> None:
        super().launch(burst)
        self._num_held = self.tables.num_held - int(np.sum(burst.reserved.filled))
        self._note("begin", self.tables.unused)

    def collect(self) -> tuple[SimulatedOutput, bool]:
        burst, table = self._running.popleft(), self.table
        live, reserved = table.live, burst.reserved
        at, left = table.row[live], (self.responses + table.prompt_length - table.length)[live]
        rows = RowState.empty(table.num_groups * table.rows_per_group)
        rows.position[at], rows.end[at] = table.length[live] - 1, table.end[live]
        start, says = rows.position.copy(), np.zeros(len(rows.position), int)
        says[at] = left
        longest, most = self.tables.pages.shape[1], num_pages_for(BURST, PAGE)
        tables = before = self.tables.rows(table.occupants, longest)
        drawn, steps, group, begun = (
            np.zeros(GROUPS, np.int32),
            0,
            table.group(live),
            self._num_held,
        )
        while steps < BURST and np.bincount(group[left > steps]).max(initial=0) > burst.threshold:
            rows.position[:], rows.live[:] = start + np.minimum(steps, says), says > steps
            after, now, unused = take(rows, tables, reserved.pages, drawn)
            if (np.asarray(now) > reserved.filled).any():
                break
            tables, drawn, steps = after, now, steps + CHECK
            self._num_held = begun + int(np.sum(drawn))
            self._note("within", float(np.sum(unused)))
        pages = added(jnp.asarray(tables), num_held(jnp.asarray(before)), most=most)
        said = np.minimum(says, steps)
        pages = np.asarray(pages)
        return SimulatedOutput(said, says > steps, steps, pages, said, *NONE_DRAFTED), True

    def note_end(self) -> None:
        """When the pages of those that a burst has ended are free again."""
        self._note("end", self.tables.unused)
        self.num_ended += self._num_held - self.tables.num_held


def run(prompts: np.ndarray, responses: np.ndarray, cap: int, share: float, at_once: int) -> dict:
    """One rollout; the host gives pages for `at_once` tokens when a burst begins."""
    of, known = np.repeat(np.arange(len(prompts)), SAMPLES), np.repeat(prompts, SAMPLES)
    caps = np.full(len(responses), cap)
    table = SequenceTable(known, caps, prompt_id=of, num_groups=GROUPS, rows_per_group=1)
    longest = num_pages_for(int(prompts.max()) + cap, PAGE)
    needed = -(-(known + responses) // PAGE)
    pages = max(int(share * needed.sum() / GROUPS), longest) + 1
    machine = free_of_charge(SPLIT, len(responses) // GROUPS, longest * PAGE)
    shapes = Shapes(machine.buckets, {SPLIT: pages}, PAGE, BURST, check_every=at_once)
    controller = Controller(Contents(table), shapes, SPLIT, runs_ahead=False)
    executor, report = Draws(responses, machine, controller.scheduler.tables), RolloutReport()
    for _ in rollout(controller, executor, FixedLayout(SPLIT), report):
        executor.note_end()
    held = executor.held
    parts = {f"unused_{when}": executor.unused[when] / (n * PAGE) for when, n in held.items()}
    return parts | {
        "ended_end": executor.num_ended / held["end"],
        "steps": report.decode_steps,
        "bursts": len(report.bursts),
        "preempted": report.preempted,
        "prefilled": report.prefill_tokens,
    }


def draw_and_run(lengths: LengthData, size: int, seed: int, share: float, at_once: int) -> dict:
    rng = np.random.default_rng(seed)
    prompts = rng.choice(lengths.prompts, size // SAMPLES)
    chance = lengths.weights / lengths.weights.sum()
    responses = rng.choice(lengths.responses, size, p=chance)
    responses = np.clip(responses, 1, lengths.cap).astype(int)
    done = run(prompts, responses, lengths.cap, share, at_once)
    return done | {"mean_response": responses.mean()}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--sequences", type=int, default=512)
    parser.add_argument("--draws", type=int, default=3)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    found = {}
    for name, lengths in read(args.data).items():
        found[name] = {}
        for pool, share in POOLS.items():
            for way, at_once in WAYS.items():
                runs = [
                    draw_and_run(lengths, args.sequences, n, share, at_once)
                    for n in range(args.draws)
                ]
                means = {key: float(np.mean([one[key] for one in runs])) for key in runs[0]}
                found[name][f"{pool}, {way}"] = means
                figures = {key: round(x, 4) for key, x in means.items()}
                print(name, pool, way, figures, flush=True)
    if args.out:
        command = "python -m benchmarks.kv_waste " + " ".join(sys.argv[1:])
        shapes = {"burst_steps": BURST, "check_every": CHECK, "page_size": PAGE}
        args.out.write_text(json.dumps({"command": command, **shapes, "lengths": found}, indent=1))


if __name__ == "__main__":
    main()
