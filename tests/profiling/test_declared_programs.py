"""How many programs a rollout declares on GPUs, and compiles before it begins. Nothing is compiled here."""

from dataclasses import replace

import pytest
from orders import order_of

from pat_jax.config.run import RolloutConfig, RunConfig
from pat_jax.models.presets import preset
from pat_jax.profiling.cross_compile.by_arithmetic import by_arithmetic
from pat_jax.profiling.predict.targets import Target
from pat_jax.programs.programs import ProgramTable


@pytest.mark.parametrize(
    ("target", "model", "prompt", "completion", "declared", "first"),
    [
        ("h100:1", "qwen3-0.6b", 512, 2048, 22, 16),
        ("h100:8", "qwen3-8b", 2048, 16_384, 249, 209),
    ],
)
def test_few_programs_are_declared_for_256_responses(
    target: str, model: str, prompt: int, completion: int, declared: int, first: int
):
    rollout = RolloutConfig(max_prompt_length=prompt, max_completion_length=completion)
    config = RunConfig(rollout=rollout, compute_dtype="bfloat16", train=False)
    build = by_arithmetic(order_of(Target.parse(target), config, preset(model), (0,)))
    table = ProgramTable()
    specs = replace(build.specs, first=build.buckets.first(prompt, build.drafter.drafts))
    specs.declare(table)
    keys = table.missing()
    assert len(keys) <= declared
    assert sum(map(specs.is_first, keys)) <= first
