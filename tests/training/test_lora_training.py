"""Adapters on devices: split, updated, merged on the way to the rollout, and what they take."""

from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from arrays import assert_same_bits
from trainers import CHAIN, LENGTH, POLICY, ROWS, host_weights, make_trainer, micro_batches

from pat_jax.engine.device.programs import Key
from pat_jax.engine.layout.layout import Layout, factored_mesh, layout_chain
from pat_jax.engine.memory import shard_bytes
from pat_jax.models.lora import Adapters, Lora
from pat_jax.models.weight_formats import WeightFormat
from pat_jax.rl.batches import TrainBatch
from pat_jax.rl.policy_loss import PolicyLoss
from pat_jax.training.trainer import Trainer
from pat_jax.training.update_memory import update_stages

LORA = Lora.of(POLICY, rank=4, alpha=6.0, targets=["all-linear"])
STEP = "init_state", "zero_gradients", "zero_sums", "grad", "apply", "base_checksum"
SINGLE = next(iter(layout_chain(factored_mesh(jax.devices()[:1]), POLICY.config)[0].values()))


@cache
def host_adapters() -> Adapters:
    """As if they had learned something; not to be written to."""
    rng = np.random.default_rng(4)
    return jax.tree.map(
        lambda x: rng.normal(0, 0.2, x.shape).astype(np.float32), LORA.abstract_params
    )


def lora_trainer(layout: Layout, *programs: str, **options: Any) -> Trainer:
    trainer = make_trainer(layout, *programs, "base_checksum", lora=LORA, **options)
    dtype = options.get("base_dtype", jnp.float32)
    base = jax.tree.map(lambda x: x.astype(dtype), host_weights())
    trainer.freeze(jax.device_put(base, trainer.trained.base_shardings))
    return trainer


def updated(trainer: Trainer) -> tuple[dict[str, float], Adapters]:
    """Metrics and new adapters of one optimizer step of two micro-batches."""
    params = jax.device_put(host_adapters(), trainer.shardings)
    state, result = trainer.update(
        trainer["init_state"](params), TrainBatch([list(micro_batches())], 1.0), None
    )
    assert jax.tree.map(lambda x: x.sharding, state.params) == trainer.shardings
    return result.metrics, jax.device_get(state.params)


def less(ours: Adapters, theirs: Adapters) -> Adapters:
    return jax.tree.map(np.subtract, ours, theirs)


@pytest.fixture(scope="module")
def single() -> tuple[dict[str, float], Adapters]:
    return updated(lora_trainer(SINGLE, *STEP))


@pytest.mark.parametrize("name", ["dp8tp1", "dp2tp4"])
def test_an_update_is_that_of_a_single_device_and_leaves_the_base(name: str, single):
    trainer = lora_trainer(CHAIN[name], *STEP)
    metrics, adapters = updated(trainer)
    assert single[0]["train/loss"] != 0 and single[0]["train/skipped_updates"] == 0
    for key, value in single[0].items():
        assert metrics[key] == pytest.approx(value, rel=2e-5, abs=1e-6), key
    moved = [np.abs(x).max() for x in jax.tree.leaves(less(adapters, host_adapters()))]
    assert min(moved) > 5e-4  # each of them has learned, by Adam's first step of 1e-3
    near = [np.mean(np.abs(x) < 1e-5) for x in jax.tree.leaves(less(adapters, single[1]))]
    assert min(near) > 0.97
    assert_same_bits(trainer.trained.frozen, host_weights())


def test_the_loss_is_that_of_the_merged_policy(single):
    full = make_trainer(SINGLE, *STEP)
    merged = LORA.merge(host_weights(), host_adapters())
    state = full["init_state"](jax.device_put(merged, full.shardings))
    _, result = full.update(state, TrainBatch([list(micro_batches())], 1.0), None)
    for name in ("train/loss", "train/behavior_gap", "train/entropy"):
        assert single[0][name] == pytest.approx(result.metrics[name], rel=1e-5, abs=1e-6), name


@pytest.mark.parametrize(
    ("dtype", "kept"),
    [(jnp.float32, "auto"), (jnp.bfloat16, "auto"), (jnp.bfloat16, "int8")],
    ids=["float32", "bfloat16", "bfloat16-int8"],
)
@pytest.mark.parametrize("source", ["dp8tp1", "dp2tp4"])
def test_the_rollout_gets_the_sum_in_its_format(source: str, dtype: jnp.dtype, kept: WeightFormat):
    """The same bits in every layout, which another program's sum may miss by a rounding."""
    names = "merge", "transfer", "checksum"
    trainer = lora_trainer(CHAIN[source], *names, dtype=dtype, weights=kept, base_dtype=dtype)
    params = jax.device_put(host_adapters(), trainer.shardings)
    policy = POLICY.with_weights(kept)
    base = jax.tree.map(lambda x: x.astype(dtype), host_weights())
    wanted = policy.store(LORA.merge(base, host_adapters()), dtype)
    first = None
    for layout in CHAIN.values():
        received = trainer.transfer(params, layout)
        assert jax.tree.map(lambda x: x.sharding, received) == layout.param_shardings(policy)
        first = first or jax.device_get(received)
        assert_same_bits(received, first)
        step = {"auto": float(jnp.finfo(dtype).eps), "int8": 1 / 64}[kept]
        for ours, theirs in zip(*map(jax.tree.leaves, (received, wanted)), strict=True):
            a, b = np.asarray(ours, np.float32), np.asarray(theirs, np.float32)
            np.testing.assert_allclose(a, b, atol=step * np.abs(b).max())
        for leaf in jax.tree.leaves(received):
            leaf.delete()  # as the rollout does: the trainer must keep its own
    assert_same_bits(params, host_adapters())
    assert_same_bits(trainer.trained.frozen, base)


def test_on_one_device_what_was_merged_becomes_what_arrives():
    """Its memory is given up: there is no third copy of the policy, and the base is still there."""
    trainer = lora_trainer(SINGLE, "merge", "transfer", "checksum", targets=[SINGLE])
    key = Key("transfer", SINGLE.split, target=SINGLE.split)
    taken = trainer.programs.bytes_taken(key)
    assert taken is not None and taken < 1000 < shard_bytes(trainer.abstract_merged)
    params = jax.device_put(host_adapters(), trainer.shardings)
    trainer.transfer(params, SINGLE)
    assert_same_bits(trainer.trained.frozen, host_weights())


@pytest.mark.parametrize("base_dtype", [jnp.float32, jnp.bfloat16], ids=["float32", "bfloat16"])
def test_memory_is_that_of_the_base_once_and_of_the_adapters_five_times(base_dtype: jnp.dtype):
    """Parameters, two moments, and gradients twice: by hand, and by what the programs are given."""
    trainer = make_trainer(
        CHAIN["dp4tp2"], "grad", "apply", "merge", "transfer", lora=LORA,
        loss=PolicyLoss(beta=0.1), base_dtype=base_dtype,
    )  # fmt: skip
    config = POLICY.config
    leaves = jax.tree.leaves(POLICY.abstract_params)
    weights = sum(x.size // 8 if x.ndim > 1 else x.size for x in leaves)  # of a device
    # The embedding is split over the four replicas, heads and hidden units over the two of a group.
    inside = [heads * config.head_dim for heads in (config.num_heads, config.num_kv_heads) * 2]
    inside += [config.mlp_dim] * 3
    floats = [LORA.rank * (config.embed_dim // 4 + width // 2) for width in inside]
    one = shard_bytes(trainer.abstract_params)
    assert one == 4 * config.num_layers * sum(floats)
    base = shard_bytes(trainer.trained.abstract_frozen)
    assert base == weights * jnp.dtype(base_dtype).itemsize
    # With the reference, which is adapters too.
    assert shard_bytes(trainer.resident) == pytest.approx(base + 4 * one, abs=64)

    split = trainer.layout.split
    apply = trainer.programs[Key("apply", split)].memory_analysis()  # pyright: ignore[reportFunctionMemberAccess]
    assert apply.argument_size_in_bytes == pytest.approx(4 * one, abs=64)
    grad = trainer.programs[Key("grad", split, ROWS, LENGTH)].memory_analysis()  # pyright: ignore[reportFunctionMemberAccess]
    batch = 64 * ROWS // 4 * LENGTH  # at most
    assert base + 2 * one < grad.argument_size_in_bytes < base + 2 * one + batch

    stages = {stage.name: stage for stage in update_stages(trainer)}
    held = shard_bytes(trainer.resident)
    assert stages[f"gradients of {ROWS} x {LENGTH} tokens"].held == held + one
    merged = 4 * weights
    for name in CHAIN:
        stage = stages[f"the transfer to {name}"]
        assert stage.held == held + merged, name
    assert stages["the merge of adapters and base"].held == held
    assert stages["the merge of adapters and base"].taken >= merged


@pytest.mark.parametrize("changed", [None, "one value"])
def test_the_base_is_known_by_a_checksum_in_either_format(changed: str | None):
    found = []
    for dtype in (jnp.float32, jnp.bfloat16):
        trainer = make_trainer(CHAIN["dp8tp1"], "base_checksum", lora=LORA, base_dtype=dtype)
        host = jax.tree.map(lambda x: np.array(x.astype(dtype)), host_weights())  # noqa: B023
        if changed and dtype == jnp.bfloat16:
            jax.tree.leaves(host)[5].flat[3] *= 2
        found.append(trainer.freeze(jax.device_put(host, trainer.trained.base_shardings)))
    assert (found[0] == found[1]) == (changed is None)
