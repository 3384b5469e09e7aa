"""Models with experts: adaptive rollouts against every static layout, in two ways to place experts.

    python -m benchmarks.planner.expert_placement --data ../shared/data --model qwen3-30b-a3b \
        --target h100:8

Here experts are on all devices, the same ones in every layout. The other way is a copy of all of
them in each replica, divided over its devices. It gathers no rows, each replica reads its own
experts, and only layouts with room for a copy can be used. Either way each static layout has all
the memory of a device that its weights leave.

Steps are composed from kernel times, response lengths are drawn from the built-in distributions,
and nothing is trained on these devices. No rollout ran on a GPU.
"""

import argparse
from dataclasses import replace
from itertools import product
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
from pat_jax.profiling.predict.kernel_model import BYTES
from pat_jax.profiling.predict.model_sizes import expert_weights
from pat_jax.profiling.predict.sources import kernels_for
from pat_jax.profiling.simulate.comparison import compare

CAPS = {"reasoning": None, "math": 4096, "pat": None}  # tokens of a response; None: plan's own
SIZES = (128, 512, 2048)


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
    latency = composer.latency_model(asked.build.buckets)
    others = {}
    for split in fitting:
        machine = machine_of(asked, (split,), memory)
        sizes = machine.buckets.rows, machine.buckets.lengths
        machine = replace(machine, truth=latency.on(*sizes))
        others[str(split)] = compare(machine, asked.lengths, asked.series).static[0].mean_s
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
    parser.add_argument("--expert_width", type=int, default=1)
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
        print(f"{lengths:10} {size:5}  {cell['adaptive_s']:8.1f} s  {here:.3f}  {there:.3f}")
    options_used = {name: getattr(args, name) for name in ("model", "target", "sums", "rollouts")}
    write(args.out, {**options_used, "cells": cells})


if __name__ == "__main__":
    main()
