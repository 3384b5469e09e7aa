"""The update is the same on every layout, and what arrives at the rollout is what was sent."""

from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from runs import same_bits

from pat_jax.engine.layout import Layout, factored_mesh, layout_chain
from pat_jax.engine.programs import Key
from pat_jax.models.policy import Params, Policy
from pat_jax.models.presets import preset
from pat_jax.models.weight_formats import WeightFormat
from pat_jax.rl.batches import MicroBatch, TrainBatch
from pat_jax.rl.update import PolicyUpdate
from pat_jax.trainer import Trainer, model_functions

CONFIG = preset("tiny", vocab_size=61)
POLICY = Policy.from_config(CONFIG)
CHAIN = {str(k): v for k, v in layout_chain(factored_mesh(jax.devices()), CONFIG)[0].items()}
ROWS, LENGTH = 8, 16


def make_trainer(
    layout: Layout,
    *programs: str,
    dtype: jnp.dtype = jnp.float32,
    weights: WeightFormat = "auto",
) -> Trainer:
    """With only the named programs compiled."""
    forward, logits = model_functions(POLICY, layout, jnp.float32, remat=True)
    trainer = Trainer(
        POLICY,
        layout,
        PolicyUpdate(forward, logits, optax.adam(1e-3), CONFIG.vocab_size),
        micro_shapes=[(ROWS, LENGTH)],
        rollout_layouts={layout.split: layout for layout in CHAIN.values()},
        rollout_dtype=dtype,
        is_on_policy=True,
        rollout_policy=POLICY.with_weights(weights),
    )
    declared = trainer.programs._declared
    for key in [key for key in declared if key.name not in programs]:
        del declared[key]
    trainer.compile()
    return trainer


@pytest.fixture(scope="module")
def weights() -> Params:
    """On the host."""
    rng = np.random.default_rng(0)
    return jax.tree.map(
        lambda x: rng.normal(x.ndim == 1, 0.2, x.shape).astype(np.float32), POLICY.abstract_params
    )


def micro_batches() -> Iterator[MicroBatch]:
    rng = np.random.default_rng(1)
    for _ in range(2):
        mask = np.arange(LENGTH) < rng.integers(4, LENGTH, ROWS)[:, None]
        yield MicroBatch(
            tokens=rng.integers(0, CONFIG.vocab_size, (ROWS, LENGTH), np.int32),
            mask=mask,
            weights=np.where(mask, 1 / 100, 0).astype(np.float32),
            advantages=rng.normal(size=ROWS).astype(np.float32),
            behavior_logprobs=np.where(mask, -4, 0).astype(np.float32),
        )


def updated(layout: Layout, weights: Params) -> tuple[dict[str, float], Params, Params]:
    """Metrics, summed gradients and new parameters of one optimizer step of two micro-batches."""
    trainer = make_trainer(layout, "init_state", "zero_gradients", "zero_sums", "grad", "apply")
    batch = list(micro_batches())
    params = jax.device_put(weights, trainer.shardings)
    grads, sums = trainer["zero_gradients"](params), trainer["zero_sums"]()
    for micro in batch:
        program = trainer.programs[Key("grad", layout.split, ROWS, LENGTH)]
        grads, sums = program(params, micro, grads, sums)
    state = trainer["init_state"](params)
    state, result = trainer.update(state, TrainBatch([batch], 1.0), None)
    assert jax.tree.map(lambda x: x.sharding, state.params) == trainer.shardings
    return result.metrics, jax.device_get(grads), jax.device_get(state.params)


@pytest.fixture(scope="module")
def single(weights: Params) -> tuple[dict[str, float], Params, Params]:
    chain, _ = layout_chain(factored_mesh(jax.devices()[:1]), CONFIG)
    (layout,) = chain.values()
    return updated(layout, weights)


@pytest.mark.parametrize("name", ["dp8tp1", "dp4tp2", "dp2tp4", "dp1tp8"])
def test_an_update_is_that_of_a_single_device(name: str, weights: Params, single):
    metrics, grads, params = updated(CHAIN[name], weights)
    assert single[0]["train/loss"] != 0 and single[0]["train/skipped_updates"] == 0
    for key, value in single[0].items():
        assert metrics[key] == pytest.approx(value, rel=2e-5, abs=1e-6), key
    for got, wanted in zip(jax.tree.leaves(grads), jax.tree.leaves(single[1]), strict=True):
        np.testing.assert_allclose(got, wanted, rtol=2e-4, atol=2e-6)
        assert np.abs(wanted).max() > 1e-4
    # The first step of Adam is the sign of the gradient times the rate, but where it is nearly 0.
    moved = [
        np.mean(np.abs(a - b) < 1e-5)
        for a, b in zip(jax.tree.leaves(params), jax.tree.leaves(single[2]), strict=True)
    ]
    assert min(moved) > 0.97


@pytest.mark.parametrize(
    ("dtype", "kept"),
    [(jnp.float32, "auto"), (jnp.bfloat16, "auto"), (jnp.float32, "int8"), (jnp.bfloat16, "fp8")],
    ids=["float32", "bfloat16", "int8", "bfloat16-fp8"],
)
def test_what_the_rollout_gets_is_what_was_sent(
    weights: Params, dtype: jnp.dtype, kept: WeightFormat
):
    """Bit for bit what one device makes of the whole weights, also where they were split over all."""
    trainer = make_trainer(CHAIN["dp8tp1"], "transfer", "checksum", dtype=dtype, weights=kept)
    params, policy = jax.device_put(weights, trainer.shardings), POLICY.with_weights(kept)
    wanted = policy.store(weights, dtype)
    for layout in CHAIN.values():
        received = trainer.transfer(params, layout)
        assert same_bits(received, wanted)
        assert jax.tree.map(lambda x: x.sharding, received) == layout.param_shardings(policy)
        for leaf in jax.tree.leaves(received):
            leaf.delete()  # as the rollout does: the trainer must keep its own
    assert same_bits(params, weights)


@pytest.mark.parametrize("kept", ["auto", "int8"])
def test_one_wrong_bit_is_noticed(
    weights: Params, kept: WeightFormat, monkeypatch: pytest.MonkeyPatch
):
    trainer = make_trainer(CHAIN["dp4tp2"], "transfer", "checksum", weights=kept)
    target = CHAIN["dp1tp8"]
    params = jax.device_put(weights, trainer.shardings)
    key = Key("transfer", CHAIN["dp4tp2"].split, target=target.split)
    transfer = trainer.programs[key]

    def flip(params: Params) -> Params:
        leaves, tree = jax.tree.flatten(transfer(params))
        damaged = np.array(leaves[3])
        damaged.view(np.uint8).flat[5] ^= 1
        leaves[3] = jax.device_put(damaged, leaves[3].sharding)
        return jax.tree.unflatten(tree, leaves)

    monkeypatch.setitem(trainer.programs._compiled, key, flip)
    with pytest.raises(RuntimeError, match=r"dp4tp2 to dp1tp8: checksum .* arrived, .* was sent"):
        trainer.transfer(params, target)
