"""What a switch costs, in decode steps of the layout that is left, and how many bytes it moves.

    python -m benchmarks.switch_cost --data ../shared/data --out benchmarks/results/switch_cost.json

Measured: on this machine's CPU devices an engine switches back and forth after every burst, with few
or many live sequences whose contexts grow, by migration, by recomputation, and half and half. The
step that it is compared with is that of the burst before.

Computed: every switch that the planner makes in replays on 8xH100 and 8xA100 (`planner_regret.py`),
from the bytes of its rounds and of its weights over the bandwidths of links and HBM; launches and
host work come on top and are not in it.
"""

import argparse
import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from itertools import product
from pathlib import Path

import numpy as np

from benchmarks.adaptive_vs_static import Lengths, Rig, describe_machine, requests
from benchmarks.kernel_tables import GPUS, MODELS, SPLITS, add_data_option, measured_kernels
from benchmarks.regret_cells import SIZES, TAILED, Cell, right
from benchmarks.workloads import read
from pat_jax.common.devices import configure
from pat_jax.config.rollout import RolloutConfig
from pat_jax.engine.relocation.rounds import rounds
from pat_jax.models.presets import preset
from pat_jax.planning.planner.planner import CostModelPlanner, Planner
from pat_jax.planning.types import MIGRATE_ALL, RECOMPUTE_ALL, Load, Plan, Split
from pat_jax.profiling.predict.composer import PAGE_SIZE, ROUND_TOKENS, Composer
from pat_jax.profiling.predict.kernel_files import NoData
from pat_jax.profiling.simulate.simulator import replay

WAYS = ("migrate", "mixed", "recompute")


@dataclass
class BackAndForth(Planner):
    """Another layout after every burst."""

    splits: tuple[Split, ...]
    way: str
    bursts: int = 0

    def start(self, load: Load) -> Split:
        del load
        return self.splits[0]

    def decide(self, load: Load, current: Split, options=()) -> Plan:
        below = {"migrate": MIGRATE_ALL, "recompute": RECOMPUTE_ALL}.get(self.way)
        below = int(np.median(load.context)) if below is None else below
        self.bursts += 1
        split = self.splits[(self.bursts - 1) % len(self.splits)]
        return Plan(split, threshold=0, recompute_below=below, reason="back and forth")


def measured(rig: Rig, live: int, way: str, tokens: int, repeats: int) -> Iterator[dict]:
    """One record for each direction."""
    forced = Lengths(tokens, None)
    found: dict[str, list] = {}
    for repeat in range(repeats):
        batch = [replace(r, max_new_tokens=tokens) for r in requests(repeat, live, forced)]
        report = rig.run(rig.together, BackAndForth(tuple(rig.together.layouts), way), batch)
        for switch, burst in zip(report.switches, report.bursts, strict=False):
            found.setdefault(f"{switch.source} to {switch.target}", []).append(
                (switch, burst.step_s)
            )
    for pair, switches in found.items():
        kv_bytes = sum(switch.bytes_moved or 0 for switch, _ in switches)
        yield {
            "live": live,
            "way": way,
            "pair": pair,
            "switches": len(switches),
            "ms": _rounded(np.median([1e3 * switch.seconds for switch, _ in switches])),
            "step_ms": _rounded(np.median([1e3 * step for _, step in switches])),
            "steps": _rounded(np.median([switch.seconds / step for switch, step in switches])),
            "steps_p90": _rounded(
                np.quantile([switch.seconds / step for switch, step in switches], 0.9)
            ),
            "bytes_over_least": _rounded(
                kv_bytes / max(sum(switch.least_bytes for switch, _ in switches), 1)
            ),
            "extra_mib": _rounded(max(switch.extra_bytes for switch, _ in switches) / 2**20),
        }


@dataclass
class Recorded(CostModelPlanner):
    """Keeps the load of every switch."""

    switches: list[tuple[Load, Split, Split]] = field(default_factory=list, init=False)

    def decide(self, load: Load, current: Split, options=()) -> Plan:
        plan = super().decide(load, current)
        if plan.split != current:
            self.switches.append((load, current, plan.split))
        return plan


def computed(cell: Cell, replays: int) -> dict | None:
    """Of the switches that raise TP: all that the planner makes but a few."""
    machine, data = cell.machine(), read(cell.data)[cell.lengths]
    composer = Composer(measured_kernels(cell.data, cell.gpu), preset(cell.model), switch_s=0.0)
    steps, sent, due, down = [], 0, 0, 0
    for seed in range(replays):
        planner = Recorded(SPLITS, *right(cell, machine.truth, seed))
        replay(data.sample(cell.size, seed), planner, machine)
        for load, source, target in planner.switches:
            if target.tp < source.tp:
                down += 1
                continue
            pages = np.bincount(
                load.group, weights=-(-load.context // PAGE_SIZE), minlength=source.dp
            ).astype(int)
            plan = rounds(pages)
            page_s = composer.migrate(source, target) / (ROUND_TOKENS / PAGE_SIZE)
            seconds = composer.reslice(source, target) + sum(r.size * page_s for r in plan)
            fullest = int(np.bincount(load.group).max())
            steps.append(seconds / composer.decode_step(source, fullest, int(load.context.max())))
            sent += sum(r.slots(source.dp) for r in plan)
            due += int(pages.sum())
    if not steps:
        return None
    return {
        "cell": f"{cell.model} on {cell.gpu}, {cell.size} sequences, {cell.lengths}",
        "switches_up": len(steps),
        "switches_down": down,
        "steps": _rounded(np.median(steps)),
        "steps_worst": _rounded(max(steps)),
        "bytes_over_least": _rounded(sent / due),
    }


def _rounded(value: float) -> float:
    return float(f"{float(value):.4g}")


def show(records: list[dict]) -> None:
    print("  ".join(f"{name:>16}" for name in records[0]))
    for record in records:
        print("  ".join(f"{value!s:>16}" for value in record.values()), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    add_data_option(parser)
    parser.add_argument("--model", default="random-100m")
    parser.add_argument("--live", type=int, nargs="+", default=[2, 16])
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--replays", type=int, default=5, help="of each cell")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    devices = configure(0)
    config = replace(
        RolloutConfig(),
        max_prompt_length=32,
        max_completion_length=args.tokens,
        prefill_blocks=8,
        min_rows=1,
        burst_steps=16,
    )
    # As many pages again: in a rollout most sequences have ended when it switches.
    rig = Rig(args.model, devices, config, 2 * max(args.live), is_alone=False)
    rig.profile(rig.together)
    here = []
    for live, way in product(args.live, WAYS):
        here += (found := list(measured(rig, live, way, args.tokens, args.repeats)))
        show(found)
    try:
        cells = [
            Cell(gpu, model, size, lengths, args.data, 0.05)
            for gpu, model, size, lengths in product(GPUS, MODELS, SIZES, TAILED)
        ]
        there = [record for cell in cells if (record := computed(cell, args.replays))]
    except NoData as error:
        sys.exit(str(error))
    show(there)
    if args.out:
        content = {
            "command": "python -m benchmarks.switch_cost " + " ".join(sys.argv[1:]),
            "machine": describe_machine(devices),
            "what": __doc__,
            "measured": here,
            "computed": there,
        }
        args.out.write_text(json.dumps(content, indent=1))


if __name__ == "__main__":
    main()
