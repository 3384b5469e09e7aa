"""A child process that compiles bursts of a model's decode steps for one GPU.

    python compiled_graphs.py TARGET MODEL FOLDER

Prints one JSON line: of each burst its draft tokens, and what the host starts, in XLA's words. XLA
writes the programs to the folder. It captures loops and branches only for a driver that it knows.
"""

import json
import os
import re
import sys
from dataclasses import replace
from pathlib import Path

from orders import order_of

from pat_jax.config.run import RolloutConfig, RunConfig
from pat_jax.models.presets import preset
from pat_jax.profiling.cross_compile.target_build import TargetBuild
from pat_jax.profiling.cross_compile.worker import devices_of
from pat_jax.profiling.predict.targets import Target
from pat_jax.programs.programs import Key, ProgramTable

DRIVER = 'driver_version: "12.9.0" runtime_version: "12.9.0" '


def with_driver(target: Target) -> Target:
    begin = "cuda_compute_capability"
    about = target.chip.description.replace(begin, DRIVER + begin)
    return replace(target, chip=replace(target.chip, description=about))


def main(text: str, name: str, folder: Path) -> None:
    rollout = RolloutConfig(max_prompt_length=512, max_completion_length=512)
    config = RunConfig(rollout=rollout, train=False, compute_dtype="bfloat16")
    model = replace(preset(name), num_layers=2)
    target = with_driver(Target.parse(text))
    build = TargetBuild(order_of(target, config, model, (2,)), devices_of(target))
    table = ProgramTable()
    build.specs.declare(table)
    (split,) = build.layouts
    found = []
    for num_draft_tokens in (0, 3):
        key = Key("decode", split, 4, build.buckets.lengths[-1], num_draft_tokens=num_draft_tokens)
        written = folder / str(num_draft_tokens)
        table.lower(key).compile(compiler_options={"xla_dump_to": str(written)})
        (thunks,) = written.glob("*thunk_sequence_after_thunk_passes.txt")
        # What is inside of a graph, a loop or a branch is indented.
        found.append([num_draft_tokens, re.findall(r"^\d+: (\w+)", thunks.read_text(), re.M)])
    print(json.dumps(found))


if __name__ == "__main__":
    with os.fdopen(os.dup(1), "w") as lines:
        os.dup2(2, 1)  # what compilers print is not ours
        sys.stdout = lines
        main(sys.argv[1], sys.argv[2], Path(sys.argv[3]))
