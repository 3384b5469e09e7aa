"""Which devices each role has, as options say, and how weights come from them to all processes."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast, get_args

import jax
import pytest
from fakes import FakeDevice
from hypothesis import given
from hypothesis import strategies as st
from placed_runs import WAITED, differences, ended, waited
from runs import JUDGE, QWEN3, TINY, write_checkpoint

from pat_jax.common.rules import OptionError
from pat_jax.config.command_line import parse
from pat_jax.layout.mesh import padded_for
from pat_jax.planning.placement import ROLES, PlacedRole, Placement, PlacementName, Positions
from pat_jax.run.roles.placed_layouts import PlacedLayouts
from pat_jax.run.roles.places import Places

HALF, OTHER, EVERY = (0, 1, 2, 3), (4, 5, 6, 7), tuple(range(8))


def places_of(options: Sequence[str], devices: Sequence[Any]) -> Places:
    config = parse(options)
    return Places.of(config.placement, devices, config.on_one_base)


def placed(*options: str) -> dict[PlacedRole, Positions]:
    return dict(places_of(options, jax.devices()).placement.places)


def test_a_run_is_flat_unless_it_is_asked_for_another_placement():
    assert placed() == placed("--placement", "flatten") == dict.fromkeys(ROLES, EVERY)


def test_the_named_placements():
    found = placed("--placement", "separate")
    assert found == dict.fromkeys(ROLES, OTHER) | {"rollout": HALF}
    found = placed("--placement", "interleave")
    expected = dict.fromkeys(ROLES, EVERY) | {"reference": HALF, "teacher": HALF, "reward": OTHER}
    assert found == expected


def test_single_roles_have_the_devices_that_are_named():
    found = placed("--placement", "separate", "--placement.rollout", "quarter")
    assert (found["rollout"], found["policy"]) == ((0, 1), (2, 3, 4, 5, 6, 7))
    found = placed(
        *("--algorithm", "ppo", "--reward", "model:judge"),
        *("--placement.reward", "0,5-6,7", "--placement.critic", "half"),
    )
    assert (found["reward"], found["critic"]) == ((0, 5, 6, 7), HALF)
    assert found["policy"] == EVERY


LAG = "--placement.lag 1 --algorithm.rollout_correction token_truncate"


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (
            "--algorithm ppo --placement.critic 4-8",
            "placement.critic is '4-8': expected devices from 0 to 7",
        ),
        (
            "--algorithm ppo --placement.critic 5-4",
            "placement.critic is '5-4': expected devices from 0 to 7",
        ),
        ("--placement.critic first", "expected devices such as 0-3"),
        ("--placement.rollout 0-3", "the devices of the policy (0-7), or none of them"),
        ("--placement separate --placement.rollout all", "fewer than all 8 devices with separate"),
        (f"{LAG} --placement separate --placement.lag 2", "an integer from 0 to 1"),
        (LAG, "expected 0 with --placement flatten"),
        (f"{LAG} --placement interleave", "0 where rollouts share devices with policy, critic"),
        (
            f"{LAG} --algorithm.beta 0.1 --placement separate --placement.reference all",
            "placement.lag is 1: expected 0 where rollouts share devices with reference",
        ),
        (
            f"{LAG} --placement separate --deterministic --rollout.compile all",
            "placement.lag is 1: expected 0 with --deterministic",
        ),
        (f"{LAG} --placement separate --train false", "expected 0 with --train false"),
        (
            f"{LAG} --placement separate --algorithm distill --teacher.model a --teacher.top_k 4",
            "placement.lag is 1: expected 0 with --teacher.top_k",
        ),
        (f"{LAG} --placement split", "placement.lag is 1: expected 0 with --placement split"),
        ("--placement both", "placement.name is 'both'"),
        (f"{LAG} --placement auto", "placement.lag is 1: expected 0 with --placement auto"),
        ("--placement auto --placement.critic half", "expected nothing with --placement auto"),
        (
            "--placement interleave --lora.rank 4 --algorithm.beta 0.1",
            "placement.reference is 'interleave': expected the policy's devices",
        ),
    ],
)
def test_what_cannot_be_is_one_sentence(options: str, expected: str):
    assert_refused(jax.devices(), options, expected)


def assert_refused(devices: Sequence[Any], options: str, expected: str) -> None:
    with pytest.raises(OptionError) as error:
        places_of(options.split(), devices)
    assert expected in str(error.value) and str(error.value).count(". ") == 0


def test_a_run_says_which_devices_its_roles_have():
    options = ("--algorithm", "ppo", "--placement", "separate", "--placement.critic", "4,6")
    places = places_of(options, jax.devices())
    words = places.describe({"rollout", "policy", "critic", "reference"})
    assert words == "devices: rollout 0-3; policy, reference 4-7; critic 4,6"
    assert places_of((), jax.devices()).describe({"rollout", "policy"}) == ""


def of_processes(*sizes: int) -> list[Any]:
    """Devices of several processes, one after the other."""
    found = [index for index, size in enumerate(sizes) for _ in range(size)]
    return [FakeDevice(i, index) for i, index in enumerate(found)]


def test_every_process_is_cut_alike():
    devices = of_processes(4, 4)
    options = ("--algorithm", "ppo", "--placement", "separate", "--placement.critic", "3")
    places = places_of(options, devices)
    found = {role: [device.id for device in places[role]] for role in ROLES}
    assert found["rollout"] == [0, 1, 4, 5] and found["critic"] == [3, 7]
    assert found["policy"] == found["reward"] == [2, 3, 6, 7]
    words = places.describe({"rollout", "policy", "critic"})
    assert words == "devices of each of 2 processes: rollout 0-1; policy 2-3; critic 3"
    assert places.row_shards(4) == 4


@pytest.mark.parametrize("sizes", [(4, 4), (3, 1), (1, 1)])
def test_flat_runs_take_all_devices_of_any_processes(sizes: tuple[int, ...]):
    devices = of_processes(*sizes)
    places = places_of((), devices)
    assert all(places[role] == devices for role in ROLES)


SPLIT = "--placement split --algorithm ppo"


@pytest.mark.parametrize(
    ("sizes", "options", "expected"),
    [
        (
            (4, 4),
            "--algorithm ppo --placement.critic 4-7",
            "devices from 0 to 3, of each process's 4",
        ),
        ((3, 1), "--placement separate", "the same number of devices in each process"),
        ((1, 1), "--placement separate", "each of the 2 processes has one device"),
        (
            (3, 1),
            "--algorithm ppo --placement.critic half",
            "placement.critic is 'half': expected the same",
        ),
        ((4, 4), f"{LAG} --placement separate", "placement.lag is 1: expected 0 with 2 processes"),
        ((8,), SPLIT, "expected flatten with 1 process: split needs an even number of processes"),
        ((4, 4), SPLIT, "expected flatten with 2 processes: split needs an even number"),
        ((1,) * 5, SPLIT, "flatten with 5 processes"),
        ((2, 2, 2, 1), SPLIT, "4 processes or more with as many devices each"),
        ((2,) * 4, f"{SPLIT} --train false", "train is False: expected true with --placement"),
        ((2,) * 4, "--placement split", "is 'grpo': expected ppo, which has a critic, with"),
        ((2,) * 4, f"{SPLIT} --lora.rank 4", "lora.rank is 4: expected 0 with --placement split"),
        ((2,) * 4, f"{SPLIT} --critic.lora.rank 4", "critic.lora.rank is 4: expected 0 with"),
        ((2,) * 4, f"{SPLIT} --placement.reward half", "expected nothing with --placement split"),
        ((2,) * 4, f"{SPLIT} {LAG}", "placement.lag is 1: expected 0 with --placement split"),
    ],
)
def test_processes_that_cannot_be_cut_alike_or_split_are_told(sizes, options, expected):
    assert_refused(of_processes(*sizes), options, expected)


def test_split_gives_models_whole_processes():
    devices = of_processes(2, 2, 2, 2)
    places = places_of(SPLIT.split(), devices)
    assert places["rollout"] == devices and places.is_split
    assert places["policy"] == places["reference"] == places["teacher"] == devices[:4]
    assert places["critic"] == places["reward"] == devices[4:]
    words = places.describe({"rollout", "policy", "critic"})
    assert words == "devices: rollout 0-7; policy 0-3; critic 4-7"


def test_devices_in_another_order_than_their_processes_are_not_split():
    tpus = [FakeDevice(i, i // 2, platform="tpu") for i in range(8)]
    for devices in of_processes(2, 2, 2, 2)[::-1], tpus:
        with pytest.raises(OptionError, match="are not in the order of their processes"):
            places_of(SPLIT.split(), cast(Any, devices))


@given(st.sampled_from(get_args(PlacementName)), st.integers(1, 16))
def test_no_device_is_left_out(name, count: int):
    placement = Placement.named(name, count)
    assert {i for place in placement.places.values() for i in place} == {*range(count)}
    assert all(place == tuple(sorted({*place})) for place in placement.places.values())
    assert placement.is_flat == (name == "flatten" or count == 1)
    assert placement.are_apart("policy", "rollout") == (name == "separate" and count > 1)


SPLIT_OPTIONS = "--algorithm ppo --placement split --algorithm.mini_batch_size 4"
SPLIT_RUN = [*TINY, *SPLIT_OPTIONS.split(), "--rollout.prompts_per_step", "96"]


def devices_of(hosts: int, processes: int, each: int) -> list[Any]:
    """So many processes of each host, with `each` devices."""
    per_host = processes * each
    return [FakeDevice(i, i // each, i // per_host) for i in range(hosts * per_host)]


@pytest.mark.parametrize(
    ("hosts", "processes", "each", "inside"),
    [(4, 1, 8, 8), (2, 2, 4, 8), (2, 8, 1, 8), (6, 1, 4, 4), (1, 4, 2, 2)],
)
def test_the_devices_of_a_host_divide_what_is_sent(hosts, processes, each, inside):
    devices = devices_of(hosts, processes, each)
    model = padded_for(devices, replace(QWEN3, embed_dim=1536, num_heads=32, num_kv_heads=8))
    config = parse(SPLIT_RUN)
    places = Places.of(config.placement, devices)
    placed = PlacedLayouts.of(model, places, config.rollout, config.layout_choice, config.fsdp_size)
    assert placed.policy.devices == {*devices[: len(devices) // 2]}
    assert {layout.devices for layout in placed.rollouts.values()} == {frozenset(devices)}
    assert placed.carriers.keys() >= placed.rollouts.keys()
    (carrier,) = {*placed.carriers.values()}
    for layout in carrier.source, carrier.target:
        assert carrier.spreads and layout.split.tp == 1
        assert layout.size(layout.fsdp_axes) == inside


def test_hosts_that_cannot_be_halved_are_refused():
    with pytest.raises(OptionError, match="split needs an even number of processes and hosts"):
        Places.of(parse(SPLIT_RUN).placement, devices_of(3, 2, 4))


PLACEMENTS = ("interleave", "dp8tp1"), ("separate", "dp4tp1")


@pytest.mark.slow  # four runs; `training/test_carriers.py` and others hold each part
def test_three_iterations_of_ppo_are_the_same_in_every_placement(tmp_path: Path):
    judge = write_checkpoint(tmp_path / "judge", JUDGE)
    # A supervised step takes what one micro-batch holds, which depends on the number of devices.
    plain = "--warm_start.steps", "0"
    flat = ended(tmp_path / "flatten", judge, "--layout", "dp4tp1", "--devices", "4", *plain)
    for name, layout in PLACEMENTS:
        other = ended(tmp_path / name, judge, "--placement", name, "--layout", layout, *plain)
        assert differences(other, flat) == [] and other.compiled == []
        early = WAITED if name == "separate" else []
        assert waited(other.rows) == [early] * len(flat.rows) != []
        devices = [4, 5, 6, 7] if name == "separate" else [*range(8)]
        assert set(map(tuple, other.devices.values())) == {tuple(devices)}
