"""`train --placement auto`: what is chosen, why, and with which options."""

from collections.abc import Sequence
from dataclasses import replace
from typing import cast

import pytest
from paying_tails import make_tails_pay

from pat_jax.commands.auto_placement import chosen_placement, with_width
from pat_jax.commands.plan import question_of
from pat_jax.common.devices import Device
from pat_jax.common.errors import UserError
from pat_jax.config.command_line import parse
from pat_jax.config.placement import PlacementConfig
from pat_jax.config.run import RunConfig
from pat_jax.profiling.capacity.placing import Placing
from pat_jax.profiling.capacity.plan_config import PlanConfig
from pat_jax.profiling.placement.candidates import Candidate, split_of
from pat_jax.profiling.placement.priced import Priced
from pat_jax.profiling.predict.targets import PaperDevice, Target
from pat_jax.run.start.places import Places

H100 = "NVIDIA H100 80GB HBM3"
TINY = """
    --model tiny --placement auto --compute_dtype bfloat16 --speculation.source none
    --rollout.prompts_per_step 16 --rollout.num_generations 4 --algorithm.mini_batch_size 16
    --rollout.max_prompt_length 1024 --rollout.max_completion_length 3072
"""


def config_of(*options: str) -> RunConfig:
    return parse([*TINY.split(), *options])


def devices_of(target: str, kind: str = H100) -> Sequence[Device]:
    found = Target.parse(target)
    places = [(i, i // found.devices_per_host) for i in range(found.num_devices)]
    return [cast("Device", PaperDevice(*place, device_kind=kind)) for place in places]


def test_a_gain_that_prices_cannot_promise_leaves_flatten():
    chosen = chosen_placement(config_of(), devices_of("h100:2"))
    assert chosen.config.placement == PlacementConfig()
    assert chosen.reason == "flatten: no other placement is predicted to be faster."
    assert "separate, gradients" in chosen.table and " chosen" in chosen.table
    assert {"rollout", "gradients of the policy"} < {*chosen.predicted_s}


@pytest.mark.parametrize(
    ("devices", "options", "reason"),
    [
        (devices_of("h100:1"), (), "flatten: there is one device."),
        (devices_of("h100:2"), ("--train", "false"), "flatten: nothing is trained."),
        (devices_of("h100:2", "cpu"), (), "v6e, not for 2 x cpu."),
    ],
)
def test_where_there_is_nothing_to_choose_it_is_flatten(
    devices: Sequence[Device], options: Sequence[str], reason: str
):
    chosen = chosen_placement(config_of(*options), devices)
    assert chosen.config.placement.name == "flatten" and chosen.reason.endswith(reason)
    assert chosen.reason.startswith("flatten: ") and not chosen.table


@pytest.mark.parametrize(
    ("options", "placement"),
    [
        ((), PlacementConfig("separate", "gradients")),
        (("--algorithm.scale_rewards", "batch"), PlacementConfig("separate", "none")),
        (("--deterministic", "true"), PlacementConfig("separate", "none")),
    ],
)
def test_a_faster_placement_is_one_that_the_run_takes(
    options: Sequence[str], placement: PlacementConfig, monkeypatch: pytest.MonkeyPatch
):
    """Were flatten ten times as slow as it is."""
    priced = Placing.priced

    def without_flatten(self: Placing, one: Candidate, **how: bool) -> Priced:
        found = priced(self, one, **how)
        slower = one.placement.is_flat and found.seconds
        return replace(found, seconds=10 * slower) if slower else found

    monkeypatch.setattr(Placing, "priced", without_flatten)
    devices = devices_of("h100:2")
    chosen = chosen_placement(config_of(*options), devices)
    assert chosen.config.placement == placement
    assert Places.of(chosen.config, devices).placement.places["rollout"] == (0,)
    assert f"{placement.name}" in chosen.reason and "times as fast as with flatten" in chosen.reason


def test_whole_processes_are_what_the_run_gives_models(monkeypatch: pytest.MonkeyPatch):
    """Were all other placements ten times as slow as they are."""
    priced = Placing.priced

    def only_split(self: Placing, one: Candidate, **how: bool) -> Priced:
        found, is_split = priced(self, one, **how), one == split_of(8, self.roles)
        return (
            found if is_split or not found.seconds else replace(found, seconds=10 * found.seconds)
        )

    monkeypatch.setattr(Placing, "priced", only_split)
    devices = devices_of("h100:2x4")
    chosen = chosen_placement(config_of("--algorithm", "ppo", "--critic.model", "tiny"), devices)
    assert chosen.config.placement == PlacementConfig("split", "none")
    assert chosen.reason.startswith("split: an iteration is predicted to be")
    assert Places.of(chosen.config, devices)["critic"] == devices[4:]
    without = config_of("--rollout.num_generations", "4")
    assert chosen_placement(without, devices).config.placement.name != "split"


def test_a_tail_that_pays_is_one_that_the_run_takes(monkeypatch: pytest.MonkeyPatch):
    make_tails_pay(monkeypatch)
    options = ["--algorithm.beta", "0.1", "--algorithm.scale_rewards", "batch"]
    chosen = chosen_placement(config_of(*options), devices_of("h100:4"))
    placement = chosen.config.placement
    assert placement == PlacementConfig(tail=placement.tail) and placement.tail > 0
    assert chosen.reason.startswith(f"flatten, tail {placement.tail}: an iteration is predicted")
    assert Places.of(chosen.config, devices_of("h100:4")).has_tail


@pytest.mark.parametrize(
    ("options", "reads_early"), [((), True), (("--deterministic", "true"), False)]
)
def test_nothing_is_read_early_where_the_clock_must_not_count(
    options: Sequence[str], reads_early: bool
):
    chosen = chosen_placement(config_of("--algorithm.beta", "0.1", *options), devices_of("h100:2"))
    for overlap in ("scores", "gradients"):
        assert (f"separate, {overlap}" in chosen.table) == reads_early


def test_devices_of_single_models_are_refused_beside_auto():
    with pytest.raises(
        UserError, match=r"--placement\.critic is '1': expected nothing with --placement auto"
    ):
        config_of("--placement.critic", "1")


@pytest.mark.parametrize("target", ["h100:8", "h100:8x2", "a100:4"])
def test_gpus_are_a_target(target: str):
    kind = {"h100": H100, "a100": "NVIDIA A100-SXM4-80GB"}[target.partition(":")[0]]
    assert str(Target.of(devices_of(target, kind))) == target


def test_hosts_with_unlike_numbers_of_gpus_are_none():
    assert Target.of([*devices_of("h100:8x2")][:12]) is None


def test_a_run_divides_experts_as_its_plan_does():
    asked = "--model qwen3-30b-a3b --rollout.prompts_per_step 16 --algorithm.mini_batch_size 16"
    config = parse([*asked.split(), "--rollout.max_completion_length", "4096"])
    options = {"target": "h100:8", "responses": 128, "max_completion_length": 4096}
    plan = PlanConfig(model="qwen3-30b-a3b", data="nowhere", train=False, **options)
    question = question_of(plan, "")
    width = with_width(config, devices_of("h100:8")).rollout.expert_width
    assert width == question.options.expert_width == 8
    assert any("--expert_width is 8" in note for note in question.costs.notes)
    assert with_width(config, devices_of("h100:8", "cpu")).rollout.expert_width is None
    pinned = replace(config, rollout=replace(config.rollout, expert_width=2))
    assert with_width(pinned, devices_of("h100:8")).rollout.expert_width == 2
