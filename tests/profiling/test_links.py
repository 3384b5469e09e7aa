"""Targets and their links: as they are described, and never faster than they allow."""

import math
import re
from collections.abc import Sequence
from dataclasses import replace
from typing import cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pat_jax.common.chips import chip_of, chips
from pat_jax.common.devices import Device
from pat_jax.common.errors import UserError
from pat_jax.layout.division import prime_factors
from pat_jax.profiling.predict.links import Sums, TorusLinks, links_of
from pat_jax.profiling.predict.targets import PaperDevice, Target, paper_devices

TARGETS = ("h100:8", "a100:8", "h200:8", "b200:8", "a40:8", "h100:8x4", "v5e:4x4", "v5p:4x4x4")
targets = st.sampled_from(TARGETS)
ways = st.sampled_from([2, 4, 8])
sizes = st.floats(1.0, 1e9)


@given(text=targets, devices=ways, num_bytes=sizes)
def test_a_sum_takes_longer_than_its_bytes_on_the_links(text: str, devices: int, num_bytes: float):
    target = Target.parse(text)
    links = links_of(target)
    least = 2 * num_bytes * (devices - 1) / devices / target.chip.link_bytes_s
    assert links.all_reduce_s(devices, num_bytes) > least
    assert links.all_gather_s(devices, num_bytes) > least / 2


@given(text=targets, devices=ways, num_bytes=sizes, factor=st.floats(1.0, 100.0))
def test_more_bytes_and_more_devices_never_take_less(text, devices, num_bytes, factor):
    links = links_of(Target.parse(text))
    for cost in (links.all_reduce_s, links.all_gather_s):
        assert cost(devices, num_bytes * factor) >= cost(devices, num_bytes)
    small = min(num_bytes, 8192.0)  # large messages gain from more axes of a torus
    assert links.all_reduce_s(8, small) >= links.all_reduce_s(2, small)


@given(num_bytes=sizes, devices=ways)
def test_the_kernel_of_a_serving_engine_is_the_fastest_way_and_no_graph_the_slowest(
    num_bytes: float, devices: int
):
    target = Target.parse("h100:8")
    ways: tuple[Sums, ...] = ("one-shot", "nccl", "ungraphed")
    one_shot, nccl, ungraphed = (
        links_of(target, sums).all_reduce_s(devices, num_bytes) for sums in ways
    )
    assert one_shot <= nccl < ungraphed


def test_sums_of_a_decode_step_are_as_long_as_they_were_measured():
    """H100, us: SGLang's kernel and NCCL in a CUDA graph, NCCL without one (FACTS of the tables)."""
    target = Target.parse("h100:8")
    measured: dict[tuple[Sums, int], tuple[float, ...]] = {  # bytes of each of 2, 4, 8 devices
        ("one-shot", 8192): (4.7, 4.8, 5.3),
        ("one-shot", 524_288): (6.4, 11.4, 15.8),
        ("nccl", 8192): (6.8, 10.0, 16.0),
        ("nccl", 524_288): (10.7, 14.5, 20.1),
    }
    for (sums, num_bytes), us in measured.items():
        links = links_of(target, sums)
        found = [1e6 * links.all_reduce_s(devices, num_bytes) for devices in (2, 4, 8)]
        assert found == pytest.approx(us, rel=0.3)
    assert 32e-6 < links_of(target, "ungraphed").all_reduce_s(8, 66_000) < 53e-6


@given(topology=st.lists(st.sampled_from([1, 2, 4, 8, 12]), min_size=2, max_size=3))
def test_a_group_is_a_block_of_the_slice(topology: list[int]):
    links, devices = TorusLinks(chips()["v5p"], tuple(topology)), 1
    for factor in [1, *reversed(prime_factors(math.prod(topology)))]:
        devices *= factor
        block = links.block(devices)
        assert math.prod(block) == devices
        assert all(whole % part == 0 for part, whole in zip(block, topology, strict=True))


def test_a_closed_axis_is_twice_as_fast_as_an_open_one():
    chip, num_bytes = chips()["v5p"], 1e9
    line, ring = TorusLinks(chip, (1, 1, 2)), TorusLinks(chip, (1, 1, 4))
    share = (3 / 4) / (1 / 2)  # what has to be sent
    times = ring.all_reduce_s(4, num_bytes) / line.all_reduce_s(2, num_bytes)
    assert times == pytest.approx(share / 2, rel=0.01)


@pytest.mark.parametrize(
    ("text", "devices", "hosts", "topology"),
    [
        ("h100:8", 8, 1, (1, 8)),
        ("a100:4x3", 12, 3, (3, 4)),
        ("V5E:2x4", 8, 1, (2, 4)),
        ("v5p:2x2x4", 16, 1, (2, 2, 4)),
    ],
)
def test_a_target_says_how_many_devices_and_how_they_are_joined(text, devices, hosts, topology):
    target = Target.parse(text)
    assert (target.num_devices, target.num_hosts, target.topology) == (devices, hosts, topology)
    assert target.devices_per_host * hosts == devices and str(target) == text.lower()


def test_a_network_is_shared_by_the_devices_of_a_host():
    target = Target.parse("H100:4x2@200")
    assert str(target) == "h100:4x2@200" and target.num_hosts == 2
    assert target.chip.host_link_bytes_s == 200e9 / 8 / 4
    assert target.chip.link_bytes_s == Target.parse("h100:4x2").chip.link_bytes_s


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("h300:8", "a100, a100-40gb, a40, h100, h200, b200, v5e, v5p, v6e"),
        ("h100", "number of devices"),
        ("h100:0", "number of devices"),
        ("h100:8x4x2", "h100:8x4"),
        ("h100:64", "at most 8.*h100:8x8"),
        ("v5p:2x4", "3 dimensions.*v5p:2x2x4"),
        ("v5e:2x2x2", "2 dimensions.*v5e:2x4"),
        *(
            (f"h100:8x4@{rate}", "Gb/s.*h100:8x4@400")
            for rate in ("", "0", "fast", "1e3", "-1", "@")
        ),
        ("h100:8@400", "several hosts"),
        ("v5e:2x4@400", "several hosts of GPUs"),
        ("", "a100, a100-40gb"),
    ],
)
def test_what_is_wrong_with_a_target_is_one_sentence(text, says):
    with pytest.raises(UserError) as raised:
        Target.parse(text)
    message = str(raised.value)
    assert message.startswith(f"target {text!r}") and re.search(says, message)
    assert "\n" not in message


def test_every_chip_is_described_as_its_compiler_wants_it():
    assert set(chips()) >= {"a100", "a40", "h100", "h200", "b200", "v5e", "v5p", "v6e"}
    for chip in chips().values():
        assert 10e9 < chip.memory_bytes < 1e12 and 1e11 < chip.memory_bytes_s < 1e13
        # The intensity at which a device stops being bound by its memory, operations a byte.
        assert 100 < chip.flops_s / chip.memory_bytes_s < 700
        assert chip.host_link_bytes_s < chip.link_bytes_s < chip.memory_bytes_s
        assert chip.host_link_bytes_s < chip.pcie_bytes_s <= chip.link_bytes_s
        if chip.platform == "cuda":
            output = dict(re.findall(r"(\w+): (\S+)", chip.description))
            assert int(output["device_memory_size"]) == chip.memory_bytes
            assert abs(int(output["memory_bandwidth"]) / chip.memory_bytes_s - 1) < 0.01
            assert chip.description.count("{") == chip.description.count("}")
            assert chip.largest_host and not chip.dimensions
        else:
            assert chip.dimensions and not chip.description and not chip.largest_host


def test_a_device_is_known_by_the_name_that_jax_gives_it():
    for chip in chips().values():
        assert chip.device_kinds
        for kind in chip.device_kinds:
            assert chip_of(kind) == chip
        if chip.platform == "cuda":  # and to XLA's compiler
            (output,) = re.findall(r'device_description_str: "(.*)"', chip.description)
            assert output in chip.device_kinds
    # 756 Tflop/s, not the 989 of its namesake: better none than another's.
    assert chip_of("NVIDIA H100 PCIe") is None and chip_of("cpu") is None


def devices_of(target: str) -> Sequence[Device]:
    kind = {"h100": "NVIDIA H100 80GB HBM3", "a100": "NVIDIA A100-SXM4-80GB"}[target[:4]]
    stand_ins = cast("list[PaperDevice]", paper_devices(Target.parse(target)))
    return [cast("Device", replace(each, device_kind=kind)) for each in stand_ins]


@pytest.mark.parametrize("target", ["h100:8", "h100:8x2", "a100:4"])
def test_gpus_are_a_target(target: str):
    assert str(Target.of(devices_of(target))) == target


def test_hosts_with_unlike_numbers_of_gpus_are_no_target():
    assert Target.of([*devices_of("h100:8x2")][:12]) is None
