"""How many programs a rollout declares on GPUs, and compiles before it begins. Nothing is compiled here.

Those of tokens compute on tokens; the others move pages and weights, and compile in a fraction of a second.
"""

from dataclasses import replace

import pytest
from orders import order_of

from pat_jax.config.run import RolloutConfig, RunConfig
from pat_jax.engine.device.programs.program_specs import ProgramSpecs
from pat_jax.models.presets import preset
from pat_jax.profiling.cross_compile.by_arithmetic import by_arithmetic
from pat_jax.profiling.predict.targets import Target
from pat_jax.programs.programs import ProgramTable


def specs_of(target: str, model: str, prompt: int, completion: int) -> ProgramSpecs:
    rollout = RolloutConfig(max_prompt_length=prompt, max_completion_length=completion)
    config = RunConfig(rollout=rollout, compute_dtype="bfloat16", train=False)
    build = by_arithmetic(order_of(Target.parse(target), config, preset(model), (0,)))
    return replace(build.specs, first=build.buckets.first(prompt, build.drafter.drafts))


@pytest.mark.parametrize(
    ("target", "model", "prompt", "completion", "declared", "first", "of_tokens"),
    [
        ("h100:1", "qwen3-0.6b", 512, 2048, 22, 16, 14),
        ("h100:8", "qwen3-8b", 2048, 16_384, 249, 185, 46),
    ],
)
def test_few_programs_are_declared_for_256_responses(
    target: str,
    model: str,
    prompt: int,
    completion: int,
    declared: int,
    first: int,
    of_tokens: int,
):
    specs = specs_of(target, model, prompt, completion)
    table = ProgramTable()
    specs.declare(table)
    keys = table.missing()
    compiled = [key for key in keys if specs.is_first(key)]
    assert len(keys) <= declared
    assert len(compiled) <= first
    assert sum(key.length > 0 for key in compiled) <= of_tokens


def test_drafts_are_measured_where_the_first_programs_hold_a_context():
    """Past it, drafts need another program, which a rollout compiles when it needs it."""
    specs = specs_of("h100:8", "qwen3-8b", 2048, 16_384)
    assert specs.first is not None and specs.first.lengths == (4096, 18_432)
    assert specs.shapes.lengths(3) == (4096, 18_432)
    every = replace(specs, first=None)
    for split in specs.layouts:
        assert specs.measured_drafts(split, 4, 4096) == every.measured_drafts(split, 4, 4096)
        assert specs.measured_drafts(split, 4, 18_432) == ()
        assert every.measured_drafts(split, 4, 18_432) == (3, 7)
