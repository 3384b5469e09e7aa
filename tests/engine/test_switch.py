"""Switches against their reference, `jax.device_put` onto the target's shardings, bit for bit."""

from dataclasses import replace
from functools import cache
from itertools import permutations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fakes import SPLITS, subject

from pat_jax.engine.layout import Layout, factored_mesh, layout_chain
from pat_jax.engine.switch import chunks, migrate, row_order
from pat_jax.models.config import ModelConfig
from pat_jax.models.kv_cache import KV_AXES, LayerCache
from pat_jax.planning.types import Split

CONFIG = ModelConfig(
    architecture="llama",
    vocab_size=61,
    embed_dim=48,
    mlp_dim=48,
    num_layers=1,
    num_heads=24,
    num_kv_heads=6,
    head_dim=2,
    vocab_multiple=24,
)
# Devices, KV heads, query heads: copies of KV heads from TP 1, 2, 4 or never; factors 2 · 3, too.
CASES = [(8, 8, 8), (8, 6, 24), (8, 3, 24), (8, 1, 8), (8, 2, 8), (6, 3, 6), (6, 2, 12)]
ROWS = 24  # of all groups together: every split divides it


@cache
def chain(num_devices: int, kv_heads: int, num_heads: int) -> dict[Split, Layout]:
    config = replace(CONFIG, num_kv_heads=kv_heads, num_heads=num_heads)
    layouts, dropped = layout_chain(factored_mesh(jax.devices()[:num_devices]), config)
    assert not dropped and len(layouts) == (4 if num_devices == 8 else 3)
    return layouts


def make_cache(kv_heads: int) -> np.ndarray:
    """Every number another one."""
    return np.arange(ROWS * kv_heads * 3 * 2, dtype=np.float32).reshape(ROWS, kv_heads, 3, 2)


def put(x: np.ndarray, layout: Layout) -> jax.Array:
    return jax.device_put(jnp.asarray(x), layout.sharding(*KV_AXES))


def assert_same_shards(one: jax.Array, other: jax.Array) -> None:
    assert one.sharding.is_equivalent_to(other.sharding, one.ndim)
    for a, b in zip(one.addressable_shards, other.addressable_shards, strict=True):
        assert a.device == b.device
        np.testing.assert_array_equal(a.data, b.data)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_migrating_equals_device_put(case):
    """There and back, for every pair: the reference first, then the identity."""
    layouts, x = chain(*case), make_cache(case[1])
    for source, target in permutations(layouts.values(), 2):
        there = jax.jit(migrate(source, target))(put(x, source))
        order = row_order(source, target, ROWS // source.split.dp)
        assert_same_shards(there, put(x[order], target))
        if source.split.tp < target.split.tp:
            back = jax.jit(migrate(target, source))(there)
            assert_same_shards(back, put(x, source))


@pytest.mark.parametrize("case", CASES, ids=str)
def test_row_order_is_a_permutation_that_the_way_back_undoes(case):
    for source, target in permutations(chain(*case).values(), 2):
        there = row_order(source, target, ROWS // source.split.dp)
        back = row_order(target, source, ROWS // target.split.dp)
        assert sorted(there) == list(range(ROWS))
        np.testing.assert_array_equal(there[back], np.arange(ROWS))


@pytest.mark.parametrize("case", CASES, ids=str)
def test_groups_merge_and_split_whole(case):
    """A target group holds the rows of whole source groups, each in its own order."""
    for source, target in permutations(chain(*case).values(), 2):
        if target.split.tp < source.split.tp:
            continue
        rows = ROWS // source.split.dp
        order = row_order(source, target, rows).reshape(-1, rows)
        np.testing.assert_array_equal(order % rows, np.broadcast_to(np.arange(rows), order.shape))


def test_a_migration_carries_every_array_of_the_cache():
    layouts = list(chain(8, 6, 24).values())
    x = make_cache(6)
    cache = (LayerCache(put(x, layouts[0]), put(x + 1, layouts[0])),) * 2
    there = jax.jit(migrate(layouts[0], layouts[2]))(cache)
    order = row_order(layouts[0], layouts[2], ROWS // 8)
    for layer in there:
        assert_same_shards(layer.keys, put(x[order], layouts[2]))
        assert_same_shards(layer.values, put(x[order] + 1, layouts[2]))


@pytest.mark.parametrize("name", ["kv8", "kv2", "kv1"])
def test_reslicing_equals_device_put(name):
    """Every pair of layouts, there and back, chunk by chunk; the old leaves are gone."""
    engine = subject(name).engine
    for source, target in permutations(engine.layouts.values(), 2):
        engine.set_weights(subject(name).weights(source), source)
        old = jax.tree.leaves(engine.params)
        engine.reslice(target)
        assert engine.layout is target
        expected = jax.tree.leaves(subject(name).weights(target))
        for moved, reference in zip(jax.tree.leaves(engine.params), expected, strict=True):
            assert_same_shards(moved, reference)
        kept = {id(leaf) for leaf in jax.tree.leaves(engine.params)}
        assert all(leaf.is_deleted() for leaf in old if id(leaf) not in kept)
        engine.reslice(source)
        back = jax.tree.leaves(subject(name).weights(source))
        for moved, reference in zip(jax.tree.leaves(engine.params), back, strict=True):
            assert_same_shards(moved, reference)
        engine.release_weights()


def test_leaves_that_do_not_change_do_not_move():
    """Norms are on every device in every layout: the same arrays before and after."""
    engine = subject("kv8").engine
    engine.set_weights(subject("kv8").weights(engine.layouts[SPLITS[0]]), engine.layouts[SPLITS[0]])
    before = jax.tree.leaves(engine.params)
    moved_bytes = engine.reslice(engine.layouts[SPLITS[3]])
    after = jax.tree.leaves(engine.params)
    stayed = [a for a, b in zip(before, after, strict=True) if a is b]
    assert {x.ndim for x in stayed} == {1}
    assert moved_bytes == sum(x.nbytes for x in after) - sum(x.nbytes for x in stayed)
    engine.release_weights()


@pytest.mark.parametrize(
    "sizes, limit, expected",
    [
        ([4, 4, 4, 4], 8, [[0, 1], [2, 3]]),
        ([4, 9, 4, 4], 8, [[0], [1], [2, 3]]),  # a leaf beyond the limit goes alone
        ([4, 4, 4], 100, [[0, 1, 2]]),
        ([], 8, []),
    ],
)
def test_chunks_hold_what_fits(sizes, limit, expected):
    assert chunks(range(len(sizes)), sizes, limit) == expected


def test_chunks_count_the_bytes_of_their_own_leaves():
    assert chunks([1, 3], [9, 4, 9, 4], 8) == [[1, 3]]
