"""A child process that compiles the decode program of a few layers of a model for one GPU.

    python compiled_decode.py TARGET MODEL

Prints one JSON line: a list of [rows, layers, kernels of a step, bytes of the largest copy].
"""

import json
import os
import sys
from dataclasses import replace

from hlo_text import largest_copy, step_kernels
from orders import order_of

from pat_jax.config.run import AlgorithmConfig, RolloutConfig, RunConfig
from pat_jax.models.presets import preset
from pat_jax.profiling.cross_compile.target_build import TargetBuild
from pat_jax.profiling.cross_compile.worker import devices_of
from pat_jax.profiling.predict.targets import Target
from pat_jax.programs.programs import Key, ProgramTable

LENGTH = 2048


def text_of(target: Target, name: str, rows: int, layers: int) -> str:
    rollout = RolloutConfig(
        prompts_per_step=rows,
        num_generations=1,
        max_prompt_length=LENGTH // 2,
        max_completion_length=LENGTH // 2,
        min_rows=rows,
    )
    config = RunConfig(
        rollout=rollout,
        algorithm=AlgorithmConfig(mini_batch_size=1),
        train=False,
        compute_dtype="bfloat16",
    )
    model = replace(preset(name), num_layers=layers)
    build = TargetBuild(order_of(target, config, model, (layers,)), devices_of(target))
    table = ProgramTable()
    build.specs.declare(table)
    (split,) = build.layouts
    key = Key("decode", split, rows, build.buckets.lengths[-1])
    return table.lower(key).compile().as_text() or ""


def main(text: str, name: str) -> None:
    found = []
    for rows in (1, 64):
        for layers in (1, 3):
            compiled = text_of(Target.parse(text), name, rows, layers)
            found.append([rows, layers, step_kernels(compiled), largest_copy(compiled)])
    print(json.dumps(found))


if __name__ == "__main__":
    with os.fdopen(os.dup(1), "w") as lines:
        os.dup2(2, 1)  # what compilers print is not ours
        sys.stdout = lines
        main(*sys.argv[1:])
