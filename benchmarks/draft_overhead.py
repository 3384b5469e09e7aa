"""What drafting adds to a step on a GPU that is not there: bytes and kernels of its compiled program.

    python -m benchmarks.draft_overhead --out benchmarks/results/draft_overhead.json

Needs the extra `plan` and no accelerator. Bursts that verify copied drafts are compiled for eight devices, one
data-parallel group of all of them, with Qwen3-8B's shapes and one layer: what is counted is the same for any number
of layers. Counted are the instructions of one step that find matches, give them room and lay out the line
(`draft`), and that accept what is right and append it to the texts (`accept`). Both are left out of a step without
drafts; what verification computes for more tokens is not counted here, but for what sampling does with their logits
(`sample`). Where a branch is right, its keys and values move: not counted either.

    microseconds    bytes over the bandwidth of the device's memory; a GPU that launches kernel by kernel takes a few
                    microseconds for each of them as well, of which most overlap with nothing
"""

import argparse
import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import jax.numpy as jnp

from benchmarks import on_targets
from pat_jax.config.speculation import SpeculationConfig
from pat_jax.engine.device.decode import DecodeFunctions
from pat_jax.engine.device.program_specs import ProgramSpecs, pages_per_group
from pat_jax.engine.device.programs import Key, ProgramTable
from pat_jax.engine.draft_choice import drafts_of
from pat_jax.engine.layout.buckets import Buckets
from pat_jax.engine.layout.layout import factored_mesh, layout_chain
from pat_jax.models.policy import Policy
from pat_jax.models.presets import preset
from pat_jax.profiling.cross_compile import hlo_costs
from pat_jax.profiling.cross_compile.worker import devices_of
from pat_jax.profiling.predict.targets import Target

TARGETS = ("h100:8",)
MODEL, PAGE, BLOCKS, STEPS, EVERY = "qwen3-8b", 16, 64, 64, 8
ROWS, LENGTHS = (1, 8, 32, 128), (2048, 16_384)
SCOPES = ("draft", "accept")
SAMPLING = "sample"


def count(target: Target, rows: int, length: int) -> dict[str, float]:
    """Of one step with the largest budget of so many rows of a group."""
    model = replace(preset(MODEL), num_layers=1)
    layouts, _ = layout_chain(factored_mesh(devices_of(target)), model)
    layouts = dict([list(layouts.items())[-1]])
    (split,) = layouts
    buckets = Buckets.build(
        (split,), capacity=rows, min_rows=rows, min_length=length, max_length=length
    )
    drafts = drafts_of(SpeculationConfig("suffix"), "cuda")
    functions = DecodeFunctions(
        Policy.from_config(model), jnp.dtype(jnp.bfloat16), (0,), EVERY, STEPS, drafts=drafts
    )
    pages = pages_per_group(layouts, buckets, PAGE)
    specs = ProgramSpecs(functions, layouts, buckets, PAGE, pages, BLOCKS)
    table = ProgramTable()
    specs.declare(table)
    budget = drafts.of(rows)[-1]
    key = Key("decode", split, rows, length, budget=budget)
    table.compile(key)
    text = table[key].as_text()  # pyright: ignore[reportFunctionMemberAccess]
    found: dict[str, float] = {"rows": rows, "tokens of a row": length, "budget": budget}
    for scope in (*SCOPES, SAMPLING):
        counted = hlo_costs.count(text, inside=2, scopes=(scope,))
        found |= {f"{scope}: bytes": counted.num_bytes, f"{scope}: kernels": counted.instructions}
    moved = sum(found[f"{scope}: bytes"] for scope in SCOPES)
    found["microseconds"] = round(1e6 * moved / target.chip.memory_bytes_s, 1)
    return found


def ask(target: str, rows: Sequence[int]) -> list[dict[str, float]]:
    """What is counted in every cell, in a process with the environment that the target's compiler wants."""
    options = "--rows", *map(str, rows)
    return on_targets.ask("benchmarks.draft_overhead", target, *options)["cells"]


def table(cells: Mapping[str, list[dict[str, Any]]]) -> str:
    lines = [
        "| target | rows | tokens of a row | budget | MB of a step | µs | kernels | sampling, MB |"
    ]
    lines.append("|---|---|---|---|---|---|---|---|")
    for target, found in cells.items():
        for one in found:
            size = sum(one[f"{scope}: bytes"] for scope in SCOPES) / 1e6
            kernels = sum(one[f"{scope}: kernels"] for scope in SCOPES)
            shape = f"{one['rows']} | {one['tokens of a row']:,} | {one['budget']}"
            drawing = one[f"{SAMPLING}: bytes"] / 1e6
            told = f"{size:.2f} | {one['microseconds']} | {kernels} | {drawing:.0f}"
            lines.append(f"| {target} | {shape} | {told} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    on_targets.add_target_options(parser, TARGETS)
    parser.add_argument("--rows", type=int, nargs="+", default=ROWS)
    args = parser.parse_args()
    if args.child:
        target = Target.parse(args.child)
        cells = [count(target, n, length) for length in LENGTHS for n in args.rows]
        print(json.dumps({"cells": cells}))
        return
    found = on_targets.read_results(args.out)
    for target in args.targets:
        found[target] = ask(target, args.rows)
        on_targets.keep_results(args.out, found)
    print(table(found))


if __name__ == "__main__":
    main()
