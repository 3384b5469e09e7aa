"""resharding the weights against its reference, `jax.device_put` onto the target's shardings."""

from itertools import permutations

import jax
import pytest
from arrays import assert_same_shards
from fakes import SPLITS, subject


@pytest.mark.parametrize("which", [("kv8",), ("kv2",), ("kv1",), ("kv2", "int8")], ids=" ".join)
def test_resharding_equals_device_put_and_sends_what_the_devices_lack(which):
    """Every pair of layouts, there and back, chunk by chunk; the old leaves are gone. Going up nothing
    is sent; going down, what the new shards hold and the old ones do not."""
    one = subject(*which)
    engine = one.engine
    for source, target in permutations(engine.layouts.values(), 2):
        engine.set_weights(one.weights(source), source)
        old, before = jax.tree.leaves(engine.params), bytes_held(engine.params)
        sent, _ = engine.weights.reshard(target)
        is_up, after = target.split.tp > source.split.tp, bytes_held(engine.params)
        assert sent == (0 if is_up else after - before)
        assert engine.layout is target
        assert_same_shards(engine.params, one.weights(target))
        kept = {id(leaf) for leaf in jax.tree.leaves(engine.params)}
        assert all(leaf.is_deleted() for leaf in old if id(leaf) not in kept)
        engine.weights.reshard(source)
        assert_same_shards(engine.params, one.weights(source))
        engine.release_weights()


@pytest.mark.parametrize("name", ["kv8", "kv2", "kv1"])
def test_lowering_tp_on_cpu_copies_each_weight_once(name):
    """To one replica's memory, which the others share: XLA takes over what lies aligned there."""
    engine = subject(name).engine
    source, target = engine.layouts[SPLITS[3]], engine.layouts[SPLITS[0]]
    engine.set_weights(subject(name).weights(source), source)
    old = jax.tree.leaves(engine.params)
    engine.weights.reshard(target)
    for before, after in zip(old, jax.tree.leaves(engine.params), strict=True):
        if after is not before:
            shards = after.addressable_shards
            assert len(shards) == target.mesh.size
            assert len({shard.data.unsafe_buffer_pointer() for shard in shards}) == 1
    engine.release_weights()


def bytes_held(params) -> int:
    """On all devices together, copies included."""
    return sum(shard.data.nbytes for x in jax.tree.leaves(params) for shard in x.addressable_shards)
