"""KV memory that is held and not used, on real response lengths; no device computes anything.

    python -m benchmarks.kv_waste --data ../shared/data --out benchmarks/results/kv_waste.json

A rollout of `--sequences` responses, eight to a prompt, in eight data-parallel groups. Who holds which
page is decided by the engine's own scheduler, and rows draw pages by the function that devices run
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

from benchmarks.workloads import LengthData, read
from pat_jax.config.rollout import RolloutConfig
from pat_jax.engine.device.page_append import added, draw, lacking, num_held
from pat_jax.engine.scheduler import Scheduler
from pat_jax.engine.sequences.page_allocator import num_pages_for
from pat_jax.engine.sequences.page_reserve import PageReserve, steps_with_room
from pat_jax.engine.sequences.sequence_table import Request, SequenceTable

SAMPLES, GROUPS = 8, 8
CONFIG = RolloutConfig()
PAGE, CHECK, BURST = CONFIG.page_size, CONFIG.check_every, CONFIG.burst_steps
WAYS = {"drawn": CHECK, "whole": BURST}  # tokens to have pages for when a burst begins
POOLS = {"all": 1.0, "tenth": 0.1}  # parts of the pages that all sequences have at their ends


def requests(prompts: np.ndarray, cap: int) -> list[Request]:
    rng = np.random.default_rng(0)
    texts = [tuple(rng.integers(0, 10**6, n).tolist()) for n in prompts.tolist()]
    none = np.zeros(2, np.uint32)
    return [Request(text, none, cap) for text in texts for _ in range(SAMPLES)]


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


class Rollout:
    """Bursts of sequences whose lengths are known."""

    def __init__(self, prompts: np.ndarray, responses: np.ndarray, cap: int, share: float):
        self.responses, self.longest = responses, num_pages_for(int(prompts.max()) + cap, PAGE)
        self.table = SequenceTable(requests(prompts, cap), num_groups=GROUPS, rows_per_group=1)
        needed = -(-(np.repeat(prompts, SAMPLES) + responses) // PAGE)
        pages = max(int(share * needed.sum() / GROUPS), self.longest) + 1
        self.scheduler = Scheduler(self.table, num_pages=pages, page_size=PAGE)
        self.held: dict[str, int] = dict.fromkeys(("begin", "within", "end"), 0)
        self.unused: dict[str, float] = dict.fromkeys(self.held, 0.0)
        self.ended = 0
        self.num_preempted = self.prefilled = self.bursts = 0

    def run(self, at_once: int) -> dict:
        table, scheduler = self.table, self.scheduler
        while table.has_work:
            room = max(at_once, steps_with_room(BURST, CHECK))
            self.num_preempted += scheduler.grow(room, at_once=at_once)
            if len(table.waiting):
                most = len(self.responses) // GROUPS
                spans = scheduler.admit(most, BURST, at_once=at_once).spans
                self.prefilled += int((spans.stop - spans.start).sum())
            self._note("begin", scheduler.pages_held, scheduler.unused)
            self._burst()
            self.bursts += 1
        parts = {f"unused_{when}": self.unused[when] / (n * PAGE) for when, n in self.held.items()}
        return parts | {
            "ended_end": self.ended / self.held["end"],
            "steps": table.num_steps,
            "bursts": self.bursts,
            "preempted": self.num_preempted,
            "prefilled": self.prefilled,
        }

    def _note(self, when: str, pages: int, unused: float) -> None:
        self.held[when] += pages
        self.unused[when] += unused

    def _burst(self) -> None:
        table, scheduler = self.table, self.scheduler
        reserve = PageReserve(scheduler.pools, table.rows_per_group * num_pages_for(BURST, PAGE))
        reserve.fill(scheduler.lacking(BURST))
        live, reserved = table.live, reserve.laid_out()
        left = self.responses[live] - (table.length - table.prompt_length)[live]
        rows = table.row_state()
        start, says = rows.position.copy(), np.zeros(len(rows.position), int)
        says[table.row[live]] = left
        tables = before = scheduler.block_tables(table.occupants, self.longest)
        drawn, steps, live_at = np.zeros(GROUPS, np.int32), 0, table.group(live)
        held = scheduler.pages_held - int(reserve.left.sum())
        threshold = table.refill_at
        while steps < BURST and np.bincount(live_at[left > steps], minlength=1).max() > threshold:
            rows.position[:], rows.live[:] = start + np.minimum(steps, says), says > steps
            after, now, unused = take(rows, tables, reserved.pages, drawn)
            if (np.asarray(now) > reserved.filled).any():
                break
            tables, drawn, steps = after, now, steps + CHECK
            self._note("within", held + int(np.sum(drawn)), float(np.sum(unused)))
        most = num_pages_for(BURST, PAGE)
        new = added(jnp.asarray(tables), num_held(jnp.asarray(before)), most=most)
        reserve.note_drawn(scheduler.add(np.asarray(new)))
        reserve.take_back()
        table.advance(np.minimum(left, steps), left > steps, steps)
        held = scheduler.pages_held
        scheduler.release_ended()
        self._note("end", held, scheduler.unused)
        self.ended += held - scheduler.pages_held


def rollout(lengths: LengthData, size: int, seed: int, share: float, at_once: int) -> dict:
    rng = np.random.default_rng(seed)
    prompts = rng.choice(lengths.prompts, size // SAMPLES)
    chance = lengths.weights / lengths.weights.sum()
    responses = rng.choice(lengths.responses, size, p=chance)
    responses = np.clip(responses, 1, lengths.cap).astype(int)
    done = Rollout(prompts, responses, lengths.cap, share).run(at_once)
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
                    rollout(lengths, args.sequences, n, share, at_once) for n in range(args.draws)
                ]
                means = {key: float(np.mean([run[key] for run in runs])) for key in runs[0]}
                found[name][f"{pool}, {way}"] = means
                figures = {key: round(x, 4) for key, x in means.items()}
                print(name, pool, way, figures, flush=True)
    if args.out:
        command = "python -m benchmarks.kv_waste " + " ".join(sys.argv[1:])
        shapes = {"burst_steps": BURST, "check_every": CHECK, "page_size": PAGE}
        args.out.write_text(json.dumps({"command": command, **shapes, "lengths": found}, indent=1))


if __name__ == "__main__":
    main()
