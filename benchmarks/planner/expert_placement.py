"""Models with experts: adaptive rollouts against every static layout, in two ways to place experts.

    python -m benchmarks.planner.expert_placement --data ../shared/data --model qwen3-30b-a3b \
        --target h100:8

Here experts are on all devices, the same ones in every layout. The other way is a copy of all of
them in each replica, divided over its devices. It gathers no rows, each replica reads its own
experts, and only layouts with room for a copy can be used. Either way each static layout has all
the memory of a device that its weights leave.

The rival's yardstick: Moebius (arXiv 2606.26607) switches between experts on all devices reached by
all-to-alls (EP, a replica on each device) and tensor parallelism over all devices (TP), and compares with
the better of these two throughout. EP's all-to-alls are DeepEP's as vLLM timed them on eight H100 (per
device and tokens, the fastest of its kernels; 4,096 wide, 6 experts a token), TP divides widths.

Steps are composed from kernel times, response lengths are drawn from the built-in distributions,
and nothing is trained on these devices. No rollout ran on a GPU.
"""

import argparse
import csv
from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from itertools import product
from pathlib import Path
from statistics import fmean
from typing import Any

from benchmarks.report import options, write
from pat_jax.commands.plan import question_of
from pat_jax.config.speculation import SpeculationConfig
from pat_jax.planning.memory import MemoryModel
from pat_jax.planning.types import Split
from pat_jax.profiling.capacity.plan_config import PlanConfig
from pat_jax.profiling.capacity.question import Question, machine_of, refused_layouts
from pat_jax.profiling.predict.composer import Composer
from pat_jax.profiling.predict.kernel_files import Interpolated, KernelTables
from pat_jax.profiling.predict.kernel_model import BYTES
from pat_jax.profiling.predict.model_sizes import expert_weights
from pat_jax.profiling.predict.sources import kernels_for
from pat_jax.profiling.simulate.comparison import compare

CAPS = {"reasoning": None, "math": 4096, "pat": None}  # tokens of a response; None: plan's own
SIZES = (128, 512, 2048)
RIVALS = "qwen3-235b-a22b"  # the model that it was measured with


class AllToAll(Composer):
    """Steps where tokens are sent to the devices of their experts."""

    def layer_links_ms(self, tokens: int, split: Split, *, is_sparse: bool = False) -> float:
        if not is_sparse:
            return super().layer_links_ms(tokens, split)
        assert isinstance(self.kernels, KernelTables)
        return sent_ms(self.kernels.folder)(tokens)


@cache
def sent_ms(folder: Path) -> Callable[[float], float]:
    """Milliseconds of a dispatch and a combine, by tokens of a device."""
    us: defaultdict[str, defaultdict[int, float]] = defaultdict(lambda: defaultdict(float))
    with (folder / "aiconfigurator" / "h100_sxm_vllm0.24_moe_all_to_all.csv").open() as file:
        for row in csv.DictReader(file):
            if row["hidden_size"] == "4096":
                us[row["comm_backend"]][int(row["num_tokens"])] += float(row["latency"])
    known = [Interpolated(points) for points in us.values()]
    return lambda tokens: min(one(tokens) for one in known if tokens <= one.sizes[-1]) / 1e3


class InReplicas(Composer):
    """Steps where each replica has all experts."""

    def expert_split(self, split: Split) -> Split:
        return Split(1, super().expert_split(split).tp)


def question(args: argparse.Namespace, lengths: str, responses: int) -> Question:
    config = PlanConfig(
        model=args.model,
        target=args.target,
        responses=responses,
        lengths=lengths,
        max_completion_length=CAPS[lengths],
        rollouts=args.rollouts,
        train=False,
        compile=False,
        sums=args.sums,
        data=str(args.data),
        expert_width=args.expert_width,
        speculation=SpeculationConfig("none"),
    )
    return question_of(config, "")


def in_replicas(asked: Question) -> tuple[MemoryModel, tuple[Split, ...]]:
    """Memory with a copy of all experts in each replica, and the layouts that have room for a
    response of full length beside it."""
    memory, order = asked.build.memory, asked.build.order
    stored = BYTES * expert_weights(order.model)
    weights = {
        split: int(held - stored / (split.dp * split.tp) + stored / split.tp)
        for split, held in memory.weights.items()
    }
    pages = {
        split: int(max(0.0, memory.usable - held) // memory.page[split])
        for split, held in weights.items()
    }
    least = -(-order.config.rollout.max_length // memory.page_size) + 1
    fitting = tuple(split for split in weights if pages[split] > least)
    return replace(memory, weights=weights, pages=pages), fitting


def replayed(args: argparse.Namespace, lengths: str, responses: int) -> dict[str, Any]:
    """Mean seconds of the rollouts of one cell."""
    asked = question(args, lengths, responses)
    refused = refused_layouts(asked, None)
    used = tuple(split for split in asked.build.layouts if split not in refused)
    found = compare(machine_of(asked, used), asked.lengths, asked.series)
    order, rollout = asked.build.order, asked.run.rollout
    composer = InReplicas(
        kernels_for(order.target, args.data, sums=args.sums),
        order.model,
        page_size=rollout.page_size,
        prefill_blocks=rollout.prefill_blocks,
    )
    memory, fitting = in_replicas(asked)

    def static_s(by: Composer, split: Split, room: MemoryModel) -> float:
        machine = machine_of(asked, (split,), room)
        machine = replace(machine, truth=by.latency_model(machine.buckets))
        return compare(machine, asked.lengths, asked.series).static[0].mean_s

    others = {str(split): static_s(composer, split, memory) for split in fitting}
    devices, kernels = order.target.num_devices, composer.kernels
    shape: dict[str, Any] = {
        "page_size": rollout.page_size,
        "prefill_blocks": rollout.prefill_blocks,
    }
    rival = {}
    if args.model == RIVALS and isinstance(kernels, KernelTables):
        tp = InReplicas(kernels, order.model, **shape, expert_ways=1, expert_width=devices)
        rival["TP"] = static_s(tp, Split(1, devices), memory)
        ep = AllToAll(kernels, order.model, **shape, expert_ways=devices)
        rival["EP"] = static_s(ep, Split(devices, 1), asked.build.memory)
    static = {system.name: system.mean_s for system in found.static}
    adaptive = found.adaptive.mean_s
    return {
        "lengths": lengths,
        "responses": responses,
        "adaptive_s": adaptive,
        "static_s": static,
        "static_in_replicas_s": others,
        "best_static_over_adaptive": min(static.values()) / adaptive,
        "best_in_replicas_over_adaptive": min(others.values()) / adaptive,
        "expert_width": asked.options.expert_width,
        "rivals_static_s": rival,
        "best_of_rivals_over_adaptive": min(rival.values()) / adaptive if rival else None,
        "switches": fmean(len(trace.switches) for trace in found.traces),
        "longest_switch_s": max(
            (move.seconds for trace in found.traces for move in trace.switches), default=0.0
        ),
    }


def main() -> None:
    parser = options(__doc__, has_data=True)
    parser.add_argument("--model", default="qwen3-30b-a3b")
    parser.add_argument("--target", default="h100:8")
    parser.add_argument("--sums", default="nccl", choices=["one-shot", "nccl", "ungraphed"])
    parser.add_argument("--expert_width", type=int, help="by default what plan chooses")
    parser.add_argument("--lengths", nargs="+", default=[*CAPS], choices=[*CAPS])
    parser.add_argument("--sizes", nargs="+", type=int, default=SIZES, help="responses")
    parser.add_argument("--rollouts", type=int, default=1)
    args = parser.parse_args()
    cells = []
    print("times as long as adapting: the best static layout, with experts here and in replicas")
    for lengths, size in product(args.lengths, args.sizes):
        cell = replayed(args, lengths, size)
        cells.append(cell)
        here, there = (cell[f"best_{name}_over_adaptive"] for name in ("static", "in_replicas"))
        rival = cell["best_of_rivals_over_adaptive"]
        print(
            f"{lengths:10} {size:5}  {cell['adaptive_s']:8.1f} s  {here:.3f}  {there:.3f}  {rival}"
        )
    options_used = {name: getattr(args, name) for name in ("model", "target", "sums", "rollouts")}
    write(args.out, {**options_used, "cells": cells})


if __name__ == "__main__":
    main()
