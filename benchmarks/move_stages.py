"""What moves between groups take in one stage and in two, on targets with fast links and with slow ones.

    python -m benchmarks.move_stages --out benchmarks/results/move_stages.json

The same rollouts under the same planner on a simulated clock: with the memory that pages have on their way
between layouts, which decides how many may be sent while all decode on; without any, so that all moves are made in
one stage; and, in the layout with the least TP alone, with the memory that all layouts have for it and with more, at the
KV cache's expense. Steps, links and memory are composed from what
ships; what the host takes to dispatch a move is not in it.
"""

import argparse
import json
import sys
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

from benchmarks.simulate_speed import machine_of
from pat_jax.common.devices import configure
from pat_jax.engine.report import RolloutReport
from pat_jax.planning.lengths.model import LengthModel
from pat_jax.planning.planner.planner import CostModelPlanner
from pat_jax.profiling.predict.targets import Target
from pat_jax.profiling.simulate.draw import Draw
from pat_jax.profiling.simulate.machine import Machine
from pat_jax.profiling.simulate.response_lengths import ResponseLengths
from pat_jax.profiling.simulate.simulator import replay

TARGETS = ("h100:8", "a40:8", "v5e:2x4")
SLOWER = (1, 10, 100)  # links than those of the target
LENGTHS = {"reasoning": 24_576, "math": 4096}  # the longest responses
LARGER = 8  # times as much memory for pages on their way


def replayed(machine: Machine, lengths: str, sequences: int, rollouts: int) -> list[RolloutReport]:
    """The first one is what the planner learns lengths from."""
    known, cap = ResponseLengths.built_in(lengths), LENGTHS[lengths]
    seen, *workloads = (known.draw(Draw(sequences, cap, seed=i)) for i in range(1 + rollouts))
    learned = LengthModel.empty(cap).updated(
        seen.responses, seen.responses >= seen.cap, seen.prompt_id
    )
    planner = CostModelPlanner(machine.splits, machine.truth, learned, memory=machine.memory)
    return [replay(workload, planner, machine) for workload in workloads]


def summary(of: list[RolloutReport]) -> dict[str, float]:
    moves = [move for one in of for move in one.balanced]
    total = sum(one.total_s for one in of)
    return {
        "seconds": round(total, 3),
        "moves": len(moves),
        "in_two_stages": sum(move.steps_between > 0 for move in moves),
        "pages": sum(move.pages for move in moves),
        "pages_sent": sum(move.pages_sent for move in moves),
        "percent_of_time": round(100 * sum(one.spent("balance") for one in of) / total, 4),
        "worst_percent": round(100 * max(one.balance_share for one in of), 4),
    }


def sending(machine: Machine, factor: int) -> Machine:
    """With so many times the memory for pages on their way, more of which is taken off the KV cache; 0: nothing
    is sent while all decode on."""
    memory = machine.memory
    assert memory is not None
    taken = max(0, factor - 1) * memory.staging
    pages = {
        split: count - -(-taken // memory.page[split]) for split, count in memory.pages.items()
    }
    memory = replace(memory, staging=factor * memory.staging, pages=pages)
    return replace(machine, memory=memory)


def cell(machine: Machine, lengths: str, sequences: int, rollouts: int) -> dict[str, Any]:
    asked = lengths, sequences, rollouts
    alone = replace(machine, splits=machine.splits[:1])
    larger, (least, *_) = sending(alone, LARGER), alone.splits
    assert larger.memory is not None
    # A v5e has no memory to spare.
    has_room = larger.memory.pages[least] * larger.memory.page_size > 2 * LENGTHS[lengths]
    cells = {
        "all layouts": {"two stages": sending(machine, 1), "one stage": sending(machine, 0)},
        f"{least} alone": {
            "two stages": sending(alone, 1),
            **({f"with {LARGER} times the memory": larger} if has_room else {}),
            "one stage": sending(alone, 0),
        },
    }
    return {
        name: {how: summary(replayed(one, *asked)) for how, one in ways.items()}
        for name, ways in cells.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--sequences", type=int, nargs="+", default=[512, 2048])
    parser.add_argument("--rollouts", type=int, default=2, help="of each cell")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    configure(0)
    found = {}
    for text, slower in product(TARGETS, SLOWER):
        target = Target.parse(text)
        chip = replace(target.chip, link_bytes_s=target.chip.link_bytes_s / slower)
        for lengths, cap in LENGTHS.items():
            for sequences in args.sequences:
                bare = machine_of(sequences, cap, replace(target, chip=chip))
                machine = replace(bare, has_pools=True)
                name = f"{text}, links {slower} times slower, {sequences} responses, {lengths}"
                found[name] = cell(machine, lengths, sequences, args.rollouts)
                print(name, json.dumps(found[name], indent=1), flush=True)
    if args.out:
        command = "python -m benchmarks.move_stages " + " ".join(sys.argv[1:])
        args.out.write_text(json.dumps({"command": command, **found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
