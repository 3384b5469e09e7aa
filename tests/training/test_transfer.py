"""What arrives at the rollout is what was sent, and what is not is noticed."""

from collections import Counter
from collections.abc import Callable
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from arrays import assert_same_bits
from hypothesis import given
from hypothesis import strategies as st
from runs import TINY
from trainers import CHAIN, CONFIG, POLICY, host_weights, make_trainer

from pat_jax.config.command_line import parse
from pat_jax.engine.engine import RolloutEngine
from pat_jax.layout.layout import Layout
from pat_jax.models.policy import Params
from pat_jax.models.weight_formats import WeightFormat
from pat_jax.planning.lengths.model import LengthModel
from pat_jax.planning.planner.scripts import FixedLayout
from pat_jax.programs.programs import Key
from pat_jax.run.generation import Generator
from pat_jax.training.checksum import checksum
from pat_jax.training.trainer import Trainer
from pat_jax.training.transfer import Transfer


@pytest.mark.parametrize(
    ("dtype", "kept"),
    [
        pytest.param(jnp.float32, "auto", marks=pytest.mark.slow),
        pytest.param(jnp.float32, "int8", marks=pytest.mark.slow),
        (jnp.bfloat16, "fp8"),
    ],
    ids=["float32", "int8", "bfloat16-fp8"],
)
def test_what_the_rollout_gets_is_what_was_sent(dtype: jnp.dtype, kept: WeightFormat):
    """Bit for bit what one device makes of the whole weights, also where they were split over all."""
    trainer = make_trainer(CHAIN["dp8tp1"], dtype=dtype, weights=kept)
    weights = host_weights()
    params, policy = jax.device_put(weights, trainer.shardings), POLICY.with_weights(kept)
    wanted = policy.store(weights, dtype)
    for layout in CHAIN.values():
        received = trainer.transfer(params, layout)
        assert_same_bits(received, wanted)
        assert jax.tree.map(lambda x: x.sharding, received) == layout.param_shardings(policy)
        for leaf in jax.tree.leaves(received):
            leaf.delete()  # as the rollout does: the trainer must keep its own
    assert_same_bits(params, weights)


@cache
def sender(kept: WeightFormat) -> Trainer:
    return make_trainer(CHAIN["dp4tp2"], weights=kept)


Fault = Callable[[list[jax.Array]], None]


def flipped(leaves: list[jax.Array]) -> None:
    """One bit, in place."""
    damaged = np.array(leaves[3])
    damaged.view(np.uint8).flat[5] ^= 1
    leaves[3] = jax.device_put(damaged, leaves[3].sharding)


def shards_swapped(leaves: list[jax.Array]) -> None:
    """Of the embedding, two devices' parts of the vocabulary."""
    embedding = next(i for i, x in enumerate(leaves) if x.shape[0] == CONFIG.padded_vocab_size)
    parts = np.split(np.array(leaves[embedding]), 8)
    parts[2], parts[5] = parts[5], parts[2]
    leaves[embedding] = jax.device_put(np.concatenate(parts), leaves[embedding].sharding)


def leaves_swapped(leaves: list[jax.Array]) -> None:
    """Two of one shape."""
    first, second = next(
        (i, j)
        for j, y in enumerate(leaves)
        for i, x in enumerate(leaves[:j])
        if x.shape == y.shape and x.ndim > 1
    )
    leaves[first], leaves[second] = leaves[second], leaves[first]


@pytest.mark.parametrize(
    ("fault", "kept"),
    [(flipped, "auto"), (shards_swapped, "auto"), (leaves_swapped, "auto"), (flipped, "int8")],
)
def test_what_is_not_what_was_sent_is_noticed(fault: Fault, kept: WeightFormat, monkeypatch):
    trainer = sender(kept)
    target = CHAIN["dp1tp8"]
    params = jax.device_put(host_weights(), trainer.shardings)
    key = Key("transfer", CHAIN["dp4tp2"].split, target=target.split)
    transfer = trainer.programs[key]

    def damaged(*sent: Params) -> Params:
        leaves, tree = jax.tree.flatten(transfer(*sent))
        fault(leaves)
        return jax.tree.unflatten(tree, leaves)

    monkeypatch.setitem(trainer.programs._compiled, key, damaged)
    with pytest.raises(RuntimeError, match=r"dp4tp2 to dp1tp8: checksum .* arrived, .* was sent"):
        trainer.transfer(params, target)


def mixed(x: int) -> int:
    """MurmurHash3's `fmix32`, in Python's integers."""
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35), (16, 1)):
        x = (x ^ x >> shift) * factor % 2**32
    return x


leaf = st.tuples(
    st.sampled_from([np.float32, jnp.bfloat16, np.int8]),
    st.sampled_from([(7,), (3, 4), (2, 3, 2)]),
)


@given(st.lists(leaf, min_size=1, max_size=3), st.integers(0, 2**32 - 1), st.data())
def test_the_checksum_is_that_of_bits_and_places(shapes, seed, data):
    rng = np.random.default_rng(seed)
    leaves = [rng.normal(scale=40, size=shape).astype(dtype) for dtype, shape in shapes]
    unsigned = {1: np.uint8, 2: np.uint16, 4: np.uint32}
    wanted = 0
    for i, x in enumerate(leaves):
        for place, bits in enumerate(x.view(unsigned[x.dtype.itemsize]).flat):
            wanted += (2 * i + 1) * mixed(int(bits) ^ place * 0x9E3779B9 % 2**32)
    wanted %= 2**32
    assert int(checksum(leaves)) == wanted
    one = data.draw(st.integers(0, len(leaves) - 1))
    order = data.draw(st.permutations(range(leaves[one].size)))
    moved = leaves[one].flatten()[np.array(order)].reshape(leaves[one].shape)
    other = int(checksum([*leaves[:one], moved, *leaves[one + 1 :]]))
    assert (other == wanted) == (moved.tobytes() == leaves[one].tobytes())


class TestTheLogProbability:
    """Of the rollout, group by group, against the trainer's."""

    @staticmethod
    def generator(kept: WeightFormat, dtype: jnp.dtype, start: str) -> Generator:
        config = parse([*TINY, "--devices", "8", "--run_dir", "unused"]).rollout
        trainer = make_trainer(CHAIN["dp8tp1"], dtype=dtype, weights=kept)
        layouts = {CHAIN[start].split: CHAIN[start]}
        policy = POLICY.with_weights(kept)
        engine = RolloutEngine(
            policy, jax.devices(), config, capacity=8, eos_ids=(0,), dtype=dtype, layouts=layouts
        )
        lengths = LengthModel.empty(config.max_completion_length)
        planner = FixedLayout(CHAIN[start].split)
        return Generator(engine, trainer, planner, config, 0, lengths)

    @pytest.mark.parametrize(
        ("dtype", "kept", "start", "most"),
        [
            (jnp.float32, "int8", "dp8tp1", 1e-4),
            pytest.param(jnp.bfloat16, "auto", "dp2tp4", 0.1, marks=pytest.mark.slow),
        ],
        ids=["int8", "bfloat16"],
    )
    def test_agrees_and_a_wrong_group_is_noticed(self, dtype, kept, start, most, monkeypatch):
        generator = self.generator(kept, dtype, start)
        params = jax.device_put(host_weights(), generator.trainer.shardings)
        generator.load(params)
        assert 0 <= generator.compare(params) < most
        send = Transfer.__call__

        def one_copy_spoilt(self: Transfer, params: Params, layout: Layout) -> Params:
            """What the last group's devices hold of one leaf: no checksum of one copy sees it."""
            leaves, tree = jax.tree.flatten(send(self, params, layout))
            x = max(leaves, key=lambda x: x.size)
            shards = [shard.data for shard in x.addressable_shards]
            for i in range(8 - layout.split.tp, 8):
                shards[i] = jax.device_put(-np.array(shards[i]), shards[i].device)
            poisoned = jax.make_array_from_single_device_arrays(x.shape, x.sharding, shards)
            return jax.tree.unflatten(tree, [poisoned if leaf is x else leaf for leaf in leaves])

        monkeypatch.setattr(Transfer, "__call__", one_copy_spoilt)
        generator.load(params)
        with pytest.raises(
            RuntimeError, match=r"log-probability is .* by the trainer: the rollout"
        ):
            generator.compare(params)

    def test_a_policy_without_numbers_is_left_to_its_rollout(self):
        generator = self.generator("int8", jnp.float32, "dp8tp1")  # compiled above
        broken = jax.tree.map(lambda x: np.full_like(x, np.nan), host_weights())
        params = jax.device_put(broken, generator.trainer.shardings)
        generator.load(params)
        assert np.isnan(generator.compare(params))


def test_arrays_that_are_alike_share_a_checksum_program():
    """One program of a whole model takes as long to compile as a training step."""
    source, target = CHAIN["dp4tp2"], CHAIN["dp1tp8"]
    trainer = make_trainer(source, targets=[target])
    arrays = jax.tree.leaves(POLICY.abstract_params)
    missing = trainer.programs.missing()
    keys = Counter(key.target for key in missing if key.name == "checksum")
    for end, shardings in (None, trainer.shardings), (target.split, target.param_shardings(POLICY)):
        placed = zip(arrays, jax.tree.leaves(shardings), strict=True)
        kinds = {(x.shape, sharding) for x, sharding in placed}
        assert keys[end] == len(kinds) < len(arrays)
