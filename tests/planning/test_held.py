"""Tokens that replicas hold while they decode, against counting them step by step."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from pat_jax.planning.held import most_held

sequences = st.lists(
    st.tuples(st.integers(0, 50), st.integers(0, 40), st.integers(0, 3)), min_size=1, max_size=12
)


@given(sequences, st.sampled_from([1, 4, 8]), st.integers(0, 3))
def test_the_group_that_reads_most_in_each_window(
    running: list[tuple[int, int, int]], every: int, more: int
):
    context, sampled, replica = np.array(running).T
    windows = -(-int(sampled.max()) // every) + more
    read = np.zeros((windows, 4))
    for tokens, output, member in running:
        for step in range(output):
            read[step // every, member] += tokens + step + 1  # its newest token as well
    held = most_held(context, sampled, replica, windows * every, every)
    np.testing.assert_allclose(held, read.max(axis=1) / every)  # of no step, none


def test_nobody_holds_nothing():
    none = np.zeros(0, int)
    assert most_held(none, none, none, 16, 8).tolist() == [0.0, 0.0]
