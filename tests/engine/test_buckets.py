"""The few shapes of a rollout: every load has a bucket, every switch ends in one."""

from itertools import permutations, product

import pytest
from fakes import SPLITS, subject
from hypothesis import given
from hypothesis import strategies as st

from pat_jax.engine.relocation.rounds import SIZES
from pat_jax.layout.buckets import Buckets, ladder, smallest_at_least
from pat_jax.planning.types import Split
from pat_jax.programs.programs import Key, ProgramTable

SIX = (Split(6, 1), Split(2, 3), Split(1, 6))


@pytest.mark.parametrize(
    "smallest, largest, steps",
    [(4, 16, (4, 8, 16)), (4, 20, (4, 8, 16, 20)), (5, 5, (5,)), (3, 5, (3, 5))],
)
def test_a_ladder_doubles_up_to_its_top(smallest, largest, steps):
    assert ladder(smallest, largest) == steps


def test_the_smallest_bucket_that_holds():
    assert [smallest_at_least((4, 8), n) for n in (1, 4, 5, 8)] == [4, 4, 8, 8]
    with pytest.raises(ValueError, match=r"no bucket of \(4, 8\) holds 9"):
        smallest_at_least((4, 8), 9)


buckets = st.builds(
    lambda splits, capacity, rows, length, longest: (
        capacity,
        longest,
        Buckets.build(
            splits, capacity=capacity, min_rows=rows, min_length=length, max_length=longest
        ),
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
        for live in (0, 1, capacity):
            per_group = -(-live // split.dp)
            chosen = buckets.rows_for(split, per_group)
            assert chosen >= max(per_group, 1)
            assert buckets.rows_below(split, chosen) < max(per_group, 1)


@given(buckets)
def test_every_bucket_has_a_bucket_to_switch_to(built):
    """Going up from each; going down from the one that a narrower layout's bucket came from."""
    _, _, buckets = built
    for narrow, wide in product(buckets.rows, repeat=2):
        if wide.tp > narrow.tp:
            ratio = narrow.dp // wide.dp
            assert {n * ratio for n in buckets.rows[narrow]} <= set(buckets.rows[wide])


@pytest.mark.parametrize("name", [pytest.param("kv8", marks=pytest.mark.slow), "kv2", "kv1"])
def test_everything_a_rollout_may_look_up_is_compiled(name):
    engine = subject(name).engine
    buckets, programs = engine.specs.buckets, engine.programs
    for split, length in product(engine.layouts, buckets.lengths):
        for blocks in engine.specs.prefill_sizes:
            assert Key("prefill", split, blocks, length) in programs
        for rows in buckets.rows[split]:
            assert Key("decode", split, rows, length) in programs
    for split in engine.layouts:
        assert Key("allocate", split) in programs and Key("copy_pages", split) in programs
        assert all(Key("unpack", split, size) in programs for size in SIZES)
    for source, target in permutations(engine.layouts.values(), 2):
        assert Key("view", source.split, target=target.split) in programs
        for size, name in product(SIZES, ("pack", "exchange", "exchange_one")):
            assert Key(name, source.split, size, target=target.split) in programs
        # However the groups merge, they fit a bucket.
        merged = max(buckets.rows[source.split]) * source.split.dp // target.split.dp
        assert merged <= max(buckets.rows[target.split])


def test_a_program_that_was_never_declared_is_named():
    with pytest.raises(KeyError, match=r"decode.*was never declared"):
        ProgramTable()[Key("decode", SPLITS[0], rows=3, length=5)]
