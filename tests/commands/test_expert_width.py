"""`--rollout.expert_width auto`: a run divides its experts as its plan does."""

from collections.abc import Sequence
from dataclasses import replace
from typing import cast

from pat_jax.commands.expert_width import with_width
from pat_jax.commands.plan import question_of
from pat_jax.common.devices import Device
from pat_jax.config.command_line import parse
from pat_jax.profiling.capacity.plan_config import PlanConfig
from pat_jax.profiling.predict.targets import PaperDevice


def eight(kind: str = "NVIDIA H100 80GB HBM3") -> Sequence[Device]:
    return [cast("Device", PaperDevice(i, 0, device_kind=kind)) for i in range(8)]


def test_a_run_divides_experts_as_its_plan_does():
    asked = "--model qwen3-30b-a3b --rollout.prompts_per_step 16 --algorithm.mini_batch_size 16"
    config = parse([*asked.split(), "--rollout.max_completion_length", "4096"])
    options = {"target": "h100:8", "responses": 128, "max_completion_length": 4096}
    plan = PlanConfig(model="qwen3-30b-a3b", train=False, **options)
    question = question_of(plan, "")
    width = with_width(config, eight()).rollout.expert_width
    assert width == question.options.expert_width == 8
    assert any("--expert_width is 8" in note for note in question.costs.notes)
    assert with_width(config, eight("cpu")).rollout.expert_width is None
    pinned = replace(config, rollout=replace(config.rollout, expert_width=2))
    assert with_width(pinned, eight()).rollout.expert_width == 2
