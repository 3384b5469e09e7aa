"""Over how many devices the copies of models in a rollout's tail are divided."""

from hypothesis import given
from hypothesis import strategies as st

from pat_jax.training.build_copies import copy_shards

POWERS = st.sampled_from([1, 2, 4, 8])


def held(devices: int, processes: int, shards: int) -> list[set[int]]:
    """The shards that each process has, where copies of a model follow one another over devices that
    are in the order of their processes."""
    each = devices // processes
    return [{i % shards for i in range(p * each, (p + 1) * each)} for p in range(processes)]


@given(POWERS, POWERS, st.sampled_from([0, 1, 2, 4, 8, 16, 32]))
def test_each_process_has_what_its_half_needs(processes: int, inside: int, fsdp_size: int):
    half = processes * inside
    shards = copy_shards(fsdp_size, half, processes)
    assert half % shards == 0
    there = held(2 * half, processes, shards)
    needed = held(half, processes, shards)
    assert all(need <= have for need, have in zip(needed, there, strict=True))
    if fsdp_size and fsdp_size <= 2 * inside:
        assert all(len(need) == shards for need in needed)  # no copy crosses processes
    elif processes <= 2:
        assert shards == half  # as many as can be
