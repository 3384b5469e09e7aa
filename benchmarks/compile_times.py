"""How long a training step takes to compile with its layers unrolled and as a loop, for absent devices.

    python -m benchmarks.compile_times --out benchmarks/results/compile_times.json

Needs the extra `plan` and no accelerator. Forward and backward of Qwen3-8B in bfloat16, parameters over all
devices, one row of 4,096 tokens on each, every layer but its input computed anew: the trainer's own program.
Seconds are of a processor, for compilers use several threads. Memory, products and collectives are those of the compiled program.
"""

import argparse
import json
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import product
from typing import Any, Literal

import jax

from benchmarks import on_targets
from pat_jax.engine.device.programs import Key
from pat_jax.models.presets import preset
from pat_jax.profiling.capacity.plan_config import PlanConfig
from pat_jax.profiling.cross_compile import hlo_costs
from pat_jax.profiling.cross_compile.hlo import collectives
from pat_jax.profiling.cross_compile.hlo_loops import loop_trips
from pat_jax.profiling.cross_compile.plant import Order, Plant
from pat_jax.profiling.cross_compile.worker import devices_of
from pat_jax.profiling.predict.targets import Target

TARGETS = ("h100:8", "v5e:4x4")
MODEL, LENGTH, DEPTHS = "qwen3-8b", 4_096, (4, 12, 36)
# And what `--scan_layers` calls them.
FORMS: dict[str, Literal["true", "false"]] = {"unrolled": "false", "loop": "true"}


def describe(target: Target, form: str, layers: int, lora_rank: int) -> dict[str, Any]:
    """Of the gradient's program, compiled for the target."""
    asked = PlanConfig(
        model=MODEL,
        target=target.text,
        max_prompt_length=LENGTH // 4,
        max_completion_length=LENGTH - LENGTH // 4,
        lora_rank=lora_rank,
        scan_layers=FORMS[form],
    )
    model = preset(MODEL)
    plant = Plant(
        Order.of(target, asked.run(target), model, [model.num_layers]), devices_of(target)
    )
    trainer = plant.trainer(replace(plant.order.model, num_layers=layers))
    jax.config.update("jax_enable_compilation_cache", False)
    start = time.process_time()
    lowered = trainer.programs.lower(
        Key("grad", trainer.layout.split, *plant.micro_shapes[-1]),
    )
    is_lowered, by_clock = time.process_time(), time.perf_counter()
    compiled = lowered.compile()
    is_compiled, clock = time.process_time(), time.perf_counter()
    memory, text = compiled.memory_analysis(), compiled.as_text() or ""
    assert memory is not None  # both compilers report it
    counted, sent = hlo_costs.count(text), Counter[str]()
    for each in collectives(text, trips=loop_trips(text)):
        sent[each.name] += each.times * each.num_bytes
    return {
        "lower_s": round(is_lowered - start, 1),
        "compile_s": round(is_compiled - is_lowered, 1),
        "by_the_clock_s": round(clock - by_clock, 1),
        "temporaries_mib": round(memory.temp_size_in_bytes / 2**20),
        "products_tflop": round(counted.flops / 1e12, 2),
        "moved_gb": round(counted.num_bytes / 1e9, 1),
        "sent_mib": {name: round(size / 2**20) for name, size in sorted(sent.items())},
    }


def ask(target: str, form: str, layers: int, *, lora_rank: int = 0) -> dict[str, Any]:
    """`describe` in a process with the environment that the target's compiler wants."""
    options = "--forms", form, "--depths", str(layers), "--lora_rank", str(lora_rank)
    return on_targets.ask("benchmarks.compile_times", target, *options)


def table(found: Mapping[str, Any]) -> str:
    lines = [
        "| target | layers | | traced and lowered | compiled | temporaries | bytes moved | gathered |"
    ]
    lines.append("|---|---|---|---|---|---|---|---|")
    for target, forms in found.items():
        depths = sorted({depth for depths in forms.values() for depth in depths}, key=int)
        for depth, form in product(depths, FORMS):
            if said := forms.get(form, {}).get(depth):
                lines.append(
                    f"| {target} | {depth} | {form} | {said['lower_s']:.1f} s | {said['compile_s']:,.0f} s "
                    f"| {said['temporaries_mib']:,} MiB | {said['moved_gb']:,.0f} GB "
                    f"| {said['sent_mib']['all-gather']:,} MiB |"
                )
    return "\n".join(lines)


def add_options(parser: argparse.ArgumentParser) -> None:
    on_targets.add_target_options(parser, TARGETS)
    parser.add_argument("--forms", nargs="+", default=list(FORMS), choices=FORMS)
    parser.add_argument("--depths", nargs="+", type=int, default=DEPTHS, help="layers")
    parser.add_argument(
        "--lora_rank", type=int, default=0, help="of adapters that alone are trained"
    )


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    add_options(parser)
    args = parser.parse_args(words)
    if args.child:
        (form,), (layers,) = args.forms, args.depths
        print(json.dumps(describe(Target.parse(args.child), form, layers, args.lora_rank)))
        return
    found = on_targets.read_results(args.out)
    for target, layers, form in product(args.targets, args.depths, args.forms):
        adapters = f", LoRA {args.lora_rank}" if args.lora_rank else ""
        of = found.setdefault(f"{target}{adapters}", {}).setdefault(form, {})
        of[str(layers)] = ask(target, form, layers, lora_rank=args.lora_rank)
        on_targets.keep_results(args.out, found)
    print(table(found))


if __name__ == "__main__":
    main()
