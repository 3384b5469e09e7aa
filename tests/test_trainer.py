"""The update is the same on every layout."""

from collections.abc import Iterator

import jax
import numpy as np
import pytest
from trainers import CHAIN, CONFIG, LENGTH, ROWS, host_weights, make_trainer

from pat_jax.engine.layout import Layout, factored_mesh, layout_chain
from pat_jax.engine.programs import Key
from pat_jax.models.policy import Params
from pat_jax.rl.batches import MicroBatch, TrainBatch


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


def updated(layout: Layout) -> tuple[dict[str, float], Params, Params]:
    """Metrics, summed gradients and new parameters of one optimizer step of two micro-batches."""
    trainer = make_trainer(layout, "init_state", "zero_gradients", "zero_sums", "grad", "apply")
    batch = list(micro_batches())
    params = jax.device_put(host_weights(), trainer.shardings)
    grads, sums = trainer["zero_gradients"](params), trainer["zero_sums"]()
    for micro in batch:
        program = trainer.programs[Key("grad", layout.split, ROWS, LENGTH)]
        grads, sums = program(params, micro, grads, sums)
    state = trainer["init_state"](params)
    state, result = trainer.update(state, TrainBatch([batch], 1.0), None)
    assert jax.tree.map(lambda x: x.sharding, state.params) == trainer.shardings
    return result.metrics, jax.device_get(grads), jax.device_get(state.params)


@pytest.fixture(scope="module")
def single() -> tuple[dict[str, float], Params, Params]:
    chain, _ = layout_chain(factored_mesh(jax.devices()[:1]), CONFIG)
    (layout,) = chain.values()
    return updated(layout)


@pytest.mark.parametrize("name", ["dp8tp1", "dp4tp2", "dp2tp4", "dp1tp8"])
def test_an_update_is_that_of_a_single_device(name: str, single):
    metrics, grads, params = updated(CHAIN[name])
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
