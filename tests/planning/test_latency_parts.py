"""A part of a profile's devices: the times of the same replicas."""

from dataclasses import replace

import pytest
from fakes import SPLITS, made_up_latency

from pat_jax.planning.latency.model import TABLES, LatencyModel
from pat_jax.planning.latency.parts import of_part
from pat_jax.planning.types import Split


@pytest.fixture
def whole() -> LatencyModel:
    """Of eight devices, each layout with other times, drafts included."""
    steps = {split: 1.0 / split.tp for split in SPLITS}
    found = made_up_latency(
        steps, steps, reshard=0.1, migrate_per_token=0.01, shift_per_token=0.02, max_rows=4
    )
    pairs = found.reshard_table
    return replace(
        found,
        reshard_table={pair: float(i) for i, pair in enumerate(pairs, 1)},
        prefill_table={(a, n): s / a.dp for (a, n), s in found.prefill_table.items()},
        verify_table={(*key, 3): 2 * s for key, s in found.decode_table.items()},
    )


def test_a_half_has_the_times_of_the_same_replicas(whole: LatencyModel):
    half = of_part(whole, 2, widest=4)
    twice = {Split(4, 1): Split(8, 1), Split(2, 2): Split(4, 2), Split(1, 4): Split(2, 4)}
    assert half.decode.keys() == twice.keys(), "dp1tp8 has no half"
    for name in TABLES:
        here, there = getattr(half, name), getattr(whole, name)
        assert here, f"{name} is not empty"
        for key, seconds in here.items():
            source = tuple(twice[x] if isinstance(x, Split) else x for x in key)
            assert there[source] == seconds
        layouts = [{*filter(lambda x: isinstance(x, Split), key)} for key in there]
        assert len(here) == sum(x <= {*twice.values()} for x in layouts)
    assert half.decode_step(Split(2, 2), 3, 100) == whole.decode_step(Split(4, 2), 3, 100)
    assert half.page_size == whole.page_size and half.reads == whole.reads


def test_layouts_that_a_part_has_not_are_left_out(whole: LatencyModel):
    assert of_part(whole, 4, widest=2).decode.keys() == {Split(2, 1), Split(1, 2)}
    # Half of each of two hosts: replicas of four devices would cross them.
    assert of_part(whole, 2, widest=2).decode.keys() == {Split(4, 1), Split(2, 2)}
    assert not of_part(whole, 16, widest=1).decode_table
