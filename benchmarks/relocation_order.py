"""Which orders of relocation a switch needs, and what recomputing instead would cost.

    python -m benchmarks.relocation_order --data ../shared/data --out benchmarks/results/relocation_order.json

Rollouts of `--sequences` responses, eight to a prompt, in each layout of eight devices; who holds which
page is decided by the engine's own scheduler, in pools that hold `--share` of what all responses need at
their ends. When a quarter, half, four fifths and 95 % of the responses have ended (the same moment twice
where two come at once), all that is live migrates to each other layout: as it is, and with pools filled to
60, 80, 95 and 100 %. For that the live sequences grow into free pages in turn, where few are live beyond
any length they could have, or the last ones are left out: only pools as they are tell what a rollout would
pay. KV heads are 8, split in every layout, or 2, replicated beyond TP 2.

Of each switch: the first of `order.TRIES` in which no more than `MOST_WAITING` pages wait, how many wait in
each that was made, and seconds of this host, which others use as well. Where the first fails, all are made,
and beside them the alternative: the first order alone. When too many wait, the shortest sequence with a page
in the buffers is recomputed, and so on until the rest finds room. That is priced for Llama-3.1-8B on 8xH100,
composed from kernel times (`simulate_speed.machine_of`): prefill packed into calls as the engine packs
them, `least` as if a call cost by what is in it, against the migration of all, and as a part of the adaptive
rollout of the same responses in the same pools (8 KV heads). What then need not migrate is not taken off.

Without `--data`: lengths of the built-in distributions.
"""

import argparse
import json
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from benchmarks.relocation_cases import (
    DEVICES,
    FILLS,
    KV_HEADS,
    PAGE,
    SAMPLES,
    SPLITS,
    Held,
    Switch,
    moments,
    pools_of,
    workloads,
)
from benchmarks.simulate_speed import machine_of
from pat_jax.common.devices import configure
from pat_jax.engine.relocation.order import MOST_WAITING, TRIES, Placed, placed_by
from pat_jax.engine.relocation.rounds import ALL
from pat_jax.engine.sequences.page_allocator import num_pages_for
from pat_jax.planning.lengths.model import LengthModel
from pat_jax.planning.planner.planner import CostModelPlanner
from pat_jax.planning.types import Split
from pat_jax.profiling.simulate.machine import Machine, Workload
from pat_jax.profiling.simulate.simulator import replay


def recomputed(switch: Switch, first: Placed) -> set[int]:
    """Sequences that are recomputed where the first order alone is tried, and `first` came of it."""
    left: set[int] = set()
    while first.most_waiting > MOST_WAITING:
        crowd = _crowd(switch, first)
        waits = [k for k in switch.goes if k not in left and crowd & switch.leaves(k)]
        left.add(min(waits, key=lambda k: switch.held.tokens[k]))
        first = placed_by(switch.moves(left), switch.old, switch.new, *TRIES[0])
    return left


def _crowd(switch: Switch, result: Placed) -> set[tuple[int, int]]:
    """Old groups and pages of what waits when for the first time too much does."""
    old, new = switch.old.groups, switch.new.groups
    pages: dict[int, set[tuple[int, int]]] = {}
    sizes: dict[int, float] = {}  # as `MOST_WAITING` counts them
    for number, shipment in enumerate(result.shipments):
        narrow, slot = np.nonzero(shipment.old_page)
        page = shipment.old_page[narrow, slot]
        pages[number] = set(zip((narrow % old).tolist(), page.tolist(), strict=True))
        is_part = old >= new and shipment.round.group != ALL
        sizes[number] = shipment.round.size / (old // new if is_part else 1)
        for other in shipment.put:
            del pages[other], sizes[other]
        if sum(sizes.values()) > MOST_WAITING:
            return set().union(*pages.values())
    raise AssertionError("more waited than may")


@dataclass(frozen=True)
class Prices:
    """Of one set of lengths on the composed machine."""

    machine: Machine
    rollout_s: float

    @classmethod
    def of(cls, workload: Workload, other: Workload, pages: int) -> "Prices":
        """The adaptive rollout in pools of `pages` (TP 1); it knows the lengths of another one."""
        longest = int(workload.prompts.max()) + workload.cap
        machine = machine_of(workload.size, longest)
        assert machine.memory is not None
        sizes = {split: pools_of(split, pages, max(KV_HEADS)).pages for split in machine.splits}
        memory = replace(machine.memory, pages=sizes)
        machine = replace(machine, memory=memory, has_pools=True)
        said = other.responses
        learned = LengthModel.empty(other.cap).updated(said, said >= other.cap, other.prompt_id)
        planner = CostModelPlanner(machine.splits, machine.truth, learned, memory=memory)
        return cls(machine, replay(workload, planner, machine).total_s)

    def switch(self, source: Split, target: Split, switch: Switch) -> dict:
        tokens, truth = switch.held.tokens[switch.goes], self.machine.truth
        fullest = np.bincount(switch.held.group[switch.goes]).max()
        migrate = truth.migrate(source, target, fullest, len(tokens), tokens.mean())
        return {"migrate_s": float(migrate), "reslice_s": truth.reslice(source, target)}

    def recompute(self, target: Split, tokens: np.ndarray) -> tuple[float, float]:
        """In whole calls, and if a call cost by what is in it; the longest first, dealt to the groups in turn."""
        truth, tokens = self.machine.truth, -np.sort(-tokens)
        group, blocks = np.arange(len(tokens)) % target.dp, -(-tokens // PAGE)
        seconds, most = truth.packed(target, group, tokens), np.bincount(group, blocks).max()
        return seconds, seconds * most / (-(-most // truth.prefill_blocks) * truth.prefill_blocks)


def timed(switch: Switch) -> Iterator[tuple[Placed, float]]:
    moves = switch.moves(set())
    for way in TRIES:
        start = time.perf_counter()
        yield placed_by(moves, switch.old, switch.new, *way), time.perf_counter() - start


def looked_at(switch: Switch, source: Split, target: Split, prices: Prices) -> dict:
    """One switch: the tries made, and the alternative where the first fails."""
    found = []
    for result, seconds in timed(switch):
        found.append((result, seconds))
        if found[0][0].most_waiting <= MOST_WAITING:
            break
    waiting = [result.most_waiting for result, _ in found]
    row = {
        "moves": len(switch.moves(set()).old_page),
        "live": len(switch.goes),
        "waits": waiting,
        "host_s": [round(seconds, 3) for _, seconds in found],
        "rounds": [len(result.shipments) for result, _ in found],
        "needed": next((k + 1 for k, n in enumerate(waiting) if n <= MOST_WAITING), None),
    }
    if row["needed"] == 1:
        return row
    start = time.perf_counter()
    left = np.array(sorted(recomputed(switch, found[0][0])))
    host_s, tokens = time.perf_counter() - start, switch.held.tokens[left]
    seconds, least = prices.recompute(target, tokens)
    return row | {
        **prices.switch(source, target, switch),
        "beyond_first_host_s": round(sum(row["host_s"][1 : row["needed"]]), 3),
        "recomputed": len(left),
        "recomputed_tokens": int(tokens.sum()),
        "recompute_host_s": round(host_s, 3),
        "recompute_s": seconds,
        "recompute_least_s": least,
        "of_rollout": seconds / prices.rollout_s,
        "of_rollout_least": least / prices.rollout_s,
    }


def rows_of(workload: Workload, pages: int, prices: Prices) -> Iterator[dict]:
    """Every switch of one set of lengths; `pages` are those of a device in TP 1."""
    for kv_heads in KV_HEADS:
        pools = {split: pools_of(split, pages, kv_heads) for split in SPLITS}
        for source in SPLITS:
            for ended, scheduler in moments(workload, pools[source]):
                for fill in FILLS:
                    held = Held.by(scheduler, fill)
                    for target in SPLITS:
                        if target == source or not len(held.tokens):
                            continue
                        switch = Switch(held, pools[source], pools[target])
                        yield {
                            "switch": f"{source} {target}",
                            "raises_tp": target.tp > source.tp,
                            "kv_heads": kv_heads,
                            "ended": ended,
                            "fill": fill,
                            **looked_at(switch, source, target, prices),
                        }


def summary(rows: list[dict]) -> dict:
    hard, first_s = beyond(rows), [row["host_s"][0] for row in rows]
    needed = [*range(1, len(TRIES) + 1), None]
    return {
        "switches": len(rows),
        "raising_tp": sum(row["raises_tp"] for row in rows),
        "needed": {str(k): sum(row["needed"] == k for row in rows) for k in needed},
        "raising_tp_beyond_the_first": sum(row["raises_tp"] for row in hard),
        "most_waiting_in_the_first": max(row["waits"][0] for row in rows),
        "first_host_s": {"median": float(np.median(first_s)), "most": max(first_s)},
        **{
            f"{key}_sum": float(sum(row[key] for row in hard))
            for key in ("beyond_first_host_s", "recompute_host_s", "recompute_s", "recomputed")
        },
        "of_rollout_mean": sum(row["of_rollout"] for row in hard) / len(rows),
        **{
            f"{key}_worst": max((row[key] for row in hard), default=0.0)
            for key in ("of_rollout", "of_rollout_least")
        },
    }


def beyond(rows: list[dict]) -> list[dict]:
    """Those for which the first order is not enough."""
    return [row for row in rows if row["needed"] != 1]


def draw(name: str, args: argparse.Namespace, seed: int) -> list[dict]:
    """Every switch of one rollout."""
    workload, other = (workloads(args.data, args.sequences, n)[name] for n in (seed, seed + 1))
    needed = -(-(workload.prompts + workload.responses) // PAGE)
    longest = num_pages_for(int(workload.prompts.max()) + workload.cap, PAGE)
    pages = max(int(args.share * needed.sum() / DEVICES), longest) + 1
    prices = Prices.of(workload, other, pages)
    about = {"lengths": name, "seed": seed, "pages": pages, "rollout_s": prices.rollout_s}
    return [about | row for row in rows_of(workload, pages, prices)]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--data", type=Path)
    parser.add_argument("--sequences", type=int, default=256)
    parser.add_argument("--share", type=float, default=0.4)
    parser.add_argument("--draws", type=int, default=2)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    configure(0)
    rows: list[dict] = []
    found: dict[str, dict] = {}
    for name in workloads(args.data, SAMPLES, seed=0):
        mine = [row for seed in range(args.draws) for row in draw(name, args, seed)]
        rows, found[name] = rows + mine, summary(mine)
        print(name, json.dumps(found[name]), flush=True)
    found["all"] = summary(rows)
    found["all, pools as they are"] = summary([row for row in rows if row["fill"] is None])
    print(json.dumps(found["all"]))
    if args.out:
        content = {
            "command": "python -m benchmarks.relocation_order " + " ".join(sys.argv[1:]),
            "most_waiting": MOST_WAITING,
            "tries": [{"is_even": is_even, "sizes": sizes} for is_even, sizes in TRIES],
            "lengths": found,
            "beyond_the_first": beyond(rows),
        }
        args.out.write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
