"""The few shapes of a rollout: every load has a bucket, every switch ends in one."""

from itertools import permutations, product

import pytest
from fakes import SPLITS
from hypothesis import given
from hypothesis import strategies as st

from pat_jax.layout.buckets import Buckets, ladder
from pat_jax.planning.types import Split
from tests.bucket_limits import BucketLimits

SIX = (Split(6, 1), Split(2, 3), Split(1, 6))


@pytest.mark.parametrize(
    "smallest, largest, steps",
    [(4, 16, (4, 8, 16)), (4, 20, (4, 8, 16, 20)), (5, 5, (5,)), (3, 5, (3, 5))],
)
def test_a_ladder_doubles_up_to_its_top(smallest, largest, steps):
    assert ladder(smallest, largest) == steps


buckets = st.builds(
    lambda splits, capacity, rows, length, longest: (
        capacity,
        longest,
        Buckets.of(splits, capacity, BucketLimits(rows, length, longest)),
    ),
    st.sampled_from([*permutations(SPLITS, 3), SPLITS, SIX, (Split(1, 1),)]),
    st.integers(1, 100),
    st.integers(1, 20),
    st.integers(1, 50),
    st.integers(1, 300),
)


@given(buckets)
def test_every_load_has_a_bucket(built):
    capacity, longest, buckets = built
    assert buckets.length_for(longest) >= longest
    for split, rows in buckets.rows.items():
        assert list(rows) == sorted(set(rows))
        for running in (0, 1, capacity):
            per_replica = -(-running // split.dp)
            chosen = buckets.rows_for(split, per_replica)
            assert chosen >= max(per_replica, 1)
            assert buckets.rows_below(split, chosen) < max(per_replica, 1)


@given(buckets)
def test_every_bucket_has_a_bucket_to_switch_to(built):
    """Going up from each; going down from the one that a narrower layout's bucket came from."""
    _, _, buckets = built
    for narrow, wide in product(buckets.rows, repeat=2):
        if wide.tp > narrow.tp:
            ratio = narrow.dp // wide.dp
            assert {n * ratio for n in buckets.rows[narrow]} <= set(buckets.rows[wide])
