"""What is sent between devices: never faster than the links allow, and never cheaper for more."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pat_jax.common.chips import chips
from pat_jax.layout.division import prime_factors
from pat_jax.profiling.predict.links import Sums, TorusLinks, links_of
from pat_jax.profiling.predict.targets import Target

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
def test_more_bytes_and_more_devices_never_take_less(
    text: str, devices: int, num_bytes: float, factor: float
):
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
