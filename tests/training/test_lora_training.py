"""Adapters on devices: split, updated, handed to the rollout beside its weights, and what they take."""

from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from arrays import assert_same_bits
from trainers import (
    CHAIN,
    IN_GROUPS,
    LENGTH,
    POLICY,
    ROWS,
    SINGLE,
    compile_named,
    host_weights,
    make_trainer,
    started,
    updated,
)

from pat_jax.layout.layout import Layout, shard_bytes
from pat_jax.models.adapted_weight import AdaptedWeight, is_adapted
from pat_jax.models.hf_tensors import hf_tensors
from pat_jax.models.lora import Adapters, Lora
from pat_jax.models.policy import Params
from pat_jax.programs.programs import Key
from pat_jax.rl.algorithm.policy_loss import PolicyLoss
from pat_jax.training.roles import Roles
from pat_jax.training.trainable_params import TrainableParams
from pat_jax.training.trainer import Trainer
from pat_jax.training.update_memory import update_stages
from pat_jax.training.update_result import update_seen

LORA = Lora.of(POLICY, rank=4, alpha=6.0, targets=["all-linear"])


@cache
def host_adapters() -> Adapters:
    """As if they had learned something; not to be written to."""
    rng = np.random.default_rng(4)
    return jax.tree.map(
        lambda x: rng.normal(0, 0.2, x.shape).astype(np.float32), LORA.abstract_params
    )


def lora_trainer(layout: Layout, **options: Any) -> Trainer:
    trainer = make_trainer(layout, lora=LORA, **options)
    dtype = options.get("compute_dtype", jnp.float32)
    base = jax.tree.map(lambda x: x.astype(dtype), host_weights())
    trainer.freeze(jax.device_put(base, trainer.trained.base_shardings))
    return trainer


def after_a_step(trainer: Trainer) -> tuple[dict[str, float], Adapters]:
    """Metrics and new adapters of one optimizer step of two micro-batches."""
    state, result = updated(trainer, started(trainer, host_adapters()))
    return result.metrics, jax.device_get(state.params)


def less(ours: Adapters, theirs: Adapters) -> Adapters:
    return jax.tree.map(np.subtract, ours, theirs)


@pytest.fixture(scope="module")
def single() -> tuple[dict[str, float], Adapters]:
    return after_a_step(lora_trainer(SINGLE))


@pytest.mark.parametrize(
    "layout",
    [CHAIN["dp2tp4"], pytest.param(IN_GROUPS[2], marks=pytest.mark.slow)],
    ids=["dp2tp4", "groups"],
)
def test_an_update_is_that_of_a_single_device_and_leaves_the_base(layout: Layout, single):
    trainer = lora_trainer(layout)
    metrics, adapters = after_a_step(trainer)
    assert single[0]["train/loss"] != 0
    for key, value in single[0].items():
        assert metrics[key] == pytest.approx(value, rel=2e-5, abs=1e-6), key
    moved = [np.abs(x).max() for x in jax.tree.leaves(less(adapters, host_adapters()))]
    assert min(moved) > 5e-4  # each of them has learned, by Adam's first step of 1e-3
    near = [np.mean(np.abs(x) < 1e-5) for x in jax.tree.leaves(less(adapters, single[1]))]
    assert min(near) > 0.97
    assert_same_bits(trainer.trained.frozen, host_weights())


def test_the_loss_is_that_of_the_merged_policy(single):
    full = make_trainer(SINGLE)
    _, result = updated(full, started(full, LORA.merge(host_weights(), host_adapters())))
    for name in ("train/loss", "train/behavior_gap", "train/entropy"):
        assert single[0][name] == pytest.approx(result.metrics[name], rel=1e-5, abs=1e-6), name


@pytest.mark.parametrize(
    ("source", "dtype", "kept"),
    [
        pytest.param("dp8tp1", jnp.float32, "auto", marks=pytest.mark.slow),
        ("dp2tp4", jnp.bfloat16, "int8"),
    ],
    ids=["float32", "bfloat16-int8"],
)
def test_the_rollout_gets_adapters_beside_its_weights(source, dtype, kept):
    """The same bits in every layout."""
    trainer = lora_trainer(CHAIN[source], dtype=dtype, weights=kept, compute_dtype=dtype)
    params = jax.device_put(host_adapters(), trainer.shardings)
    policy = LORA.beside(POLICY.with_weights(kept))
    base = jax.tree.map(lambda x: x.astype(dtype), host_weights())
    wanted = jax.device_get(policy.store(LORA.attach(base, host_adapters()), dtype))
    for layout in CHAIN.values():
        received = trainer.transfer(params, layout)
        assert jax.tree.map(lambda x: x.sharding, received) == layout.param_shardings(policy)
        assert_same_bits(received, wanted)
        for leaf in jax.tree.leaves(received):
            leaf.delete()  # as the rollout does: the trainer must keep its own
    assert_same_bits(params, host_adapters())
    assert_same_bits(trainer.trained.frozen, base)


def weights_of(params: Params) -> list[np.ndarray]:
    """What a rollout multiplies by where there are adapters, by NumPy in float64."""
    leaves = jax.tree.leaves(params, is_leaf=is_adapted)
    tensors = jax.tree.leaves(hf_tensors(POLICY))
    found = [x for x, tensor in zip(leaves, tensors, strict=True) if tensor.module in LORA.modules]
    return [whole(x) if is_adapted(x) else np.asarray(x, np.float64) for x in found]


def whole(weight: AdaptedWeight) -> np.ndarray:
    a, b = np.asarray(weight.a, np.float64), np.asarray(weight.b, np.float64)
    return np.asarray(weight.weight, np.float64) + np.tensordot(b, a, 1)


def share(ours: list[np.ndarray], theirs: list[np.ndarray]) -> float:
    """⟨ours, theirs⟩ / ⟨theirs, theirs⟩."""
    dot = sum(np.vdot(x, y) for x, y in zip(ours, theirs, strict=True))
    return float(dot / sum(np.vdot(x, x) for x in theirs))


@pytest.mark.slow  # a trainer of its own
def test_a_rollout_in_bfloat16_sees_each_update_of_a_millionth():
    """Weights on the bfloat16 grid, whose last bits are larger by far."""
    optimizer, dtype = optax.adam(1e-6), jnp.bfloat16
    trainer = lora_trainer(CHAIN["dp2tp4"], dtype=dtype, compute_dtype=dtype, optimizer=optimizer)
    state = started(trainer, LORA.init(0))

    def both() -> tuple[list[np.ndarray], list[np.ndarray]]:
        received = trainer.transfer(state.params, trainer.layout)
        return weights_of(received), weights_of(LORA.attach(trainer.trained.frozen, state.params))

    begun = before = both()
    for _ in range(5):
        state, result = updated(trainer, state)
        now = both()
        ours, theirs = (
            [x - y for x, y in zip(*pair, strict=True)] for pair in zip(now, before, strict=True)
        )
        assert share(ours, theirs) > 0.9
        assert result.metrics["train/update_seen"] == pytest.approx(share(ours, theirs), abs=2e-3)
        before = now
    ours, theirs = (
        [x - y for x, y in zip(*pair, strict=True)] for pair in zip(before, begun, strict=True)
    )
    assert share(ours, theirs) > 0.9


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("step", [1e-2, 1e-6])
def test_of_adapters_on_the_grid_what_lies_below_their_last_bits_is_not_seen(dtype, step):
    on_grid = jax.tree.map(lambda x: x.astype(jnp.bfloat16).astype(np.float32), host_adapters())
    rng = np.random.default_rng(5)
    moved = jax.tree.map(lambda x: step * rng.normal(size=x.shape).astype(np.float32), on_grid)
    now = jax.tree.map(np.add, on_grid, moved)
    seen = float(update_seen(on_grid, now, scale=2.0, dtype=dtype))
    if dtype == jnp.float32:
        assert seen == pytest.approx(1, abs=1e-6)
    else:
        assert abs(seen - (step > 1e-3)) < 0.05
    assert np.isnan(update_seen(on_grid, on_grid, scale=2.0, dtype=dtype))


@pytest.mark.slow  # a trainer of its own
def test_memory_is_that_of_the_base_once_and_of_the_adapters_six_times():
    """Parameters now and before, two moments, and gradients twice: by hand, and by what the programs
    are given."""
    loss, compute_dtype = PolicyLoss(beta=0.1), jnp.dtype(jnp.bfloat16)
    layout = CHAIN["dp4tp2"]
    reference = TrainableParams(POLICY, layout, LORA).abstract  # adapters too, on the same base
    trainer = make_trainer(
        layout, lora=LORA, loss=loss, compute_dtype=compute_dtype, others=[reference]
    )
    compile_named(trainer, "grad", "apply", "transfer")
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
    assert base == weights * compute_dtype.itemsize
    assert shard_bytes(trainer.resident) == pytest.approx(base + 4 * one, abs=64)

    split = trainer.layout.split
    apply = trainer.programs[Key("apply", split)].memory_analysis()  # pyright: ignore[reportFunctionMemberAccess]
    assert apply.argument_size_in_bytes == pytest.approx(4 * one, abs=64)
    grad = trainer.programs[Key("grad", split, ROWS, LENGTH)].memory_analysis()  # pyright: ignore[reportFunctionMemberAccess]
    batch = 64 * ROWS // 4 * LENGTH  # at most
    assert base + 2 * one < grad.argument_size_in_bytes < base + 2 * one + batch

    stages = {stage.name: stage for stage in update_stages(Roles(trainer))}
    held = shard_bytes(trainer.resident) + one
    assert stages[f"gradients of {ROWS} x {LENGTH} tokens"].held == held + one
    for name in CHAIN:
        assert stages[f"the transfer to {name}"].held == held, name


@pytest.mark.parametrize("changed", [None, "one value"])
def test_the_base_is_known_by_a_checksum_in_either_format(changed: str | None):
    found = []
    for dtype in (jnp.float32, jnp.bfloat16):
        trainer = make_trainer(CHAIN["dp8tp1"], lora=LORA, compute_dtype=dtype)
        host = jax.tree.map(lambda x: np.array(x.astype(dtype)), host_weights())  # noqa: B023
        if changed and dtype == jnp.bfloat16:
            jax.tree.leaves(host)[5].flat[3] *= 2
        found.append(trainer.freeze(jax.device_put(host, trainer.trained.base_shardings)))
    assert (found[0] == found[1]) == (changed is None)
