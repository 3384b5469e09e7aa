"""The critic as a trained role: its update is that of a plain gradient, in every layout and with adapters."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import trainers
from chex import assert_trees_all_close
from safetensors.numpy import load_file
from trainers import CHAIN, CONFIG, IN_GROUPS, LENGTH, ROWS, SINGLE, weights_of

from pat_jax.layout.chain import layout_chain
from pat_jax.layout.layout import Layout
from pat_jax.layout.mesh import factored_mesh, padded_for
from pat_jax.models.checkpoints.hf_load import check_checkpoint, load_params
from pat_jax.models.lora import Lora
from pat_jax.models.policy import Params, Policy
from pat_jax.rl.algorithm.predict import Predictor
from pat_jax.rl.algorithm.update import Update
from pat_jax.rl.algorithm.value_loss import ValueLoss
from pat_jax.rl.batches.packing import shapes
from pat_jax.rl.batches.train_batch import MicroBatch, TrainBatch
from pat_jax.training.passes import model_functions
from pat_jax.training.reader import Reader, TextScorer
from pat_jax.training.trainable_params import TrainableParams
from pat_jax.training.trainer import CRITIC, Trainer
from pat_jax.training.transfer import Receivers

POLICY = Policy.from_config(replace(CONFIG, head="scalar", head_bias=True))
EPSILON, RATE = 0.2, 1e-2


def critic(layout: Layout, lora: Lora | None = None) -> Trainer:
    functions = model_functions(POLICY, layout, jnp.dtype(jnp.float32))
    # Plain descent: parameters move as their gradients say, not by their signs alone.
    update = Update(Predictor(functions, CONFIG.vocab_size), optax.sgd(RATE), ValueLoss(EPSILON))
    trained = TrainableParams(POLICY, layout, lora)
    shapes = [(ROWS, LENGTH)]
    return Trainer(trained, update, Receivers(jnp.float32), micro_shapes=shapes, name=CRITIC)


def micro_batches() -> Iterator[MicroBatch]:
    """Those of a policy's trainer, with returns that differ within a response."""
    for micro in trainers.micro_batches():
        returns = micro.columns["advantages"] + 0.1 * micro.positions * micro.mask
        yield replace(micro, columns={"returns": returns.astype(np.float32)})


@jax.jit
def plain_values(params: Params, tokens: np.ndarray) -> jax.Array:
    """By the model alone: no programs of a trainer, no layout."""
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
    model = POLICY.bind(params)
    hidden, *_ = model(jnp.asarray(tokens), positions)
    weights, bias = model.scalar_head
    assert bias is not None
    return hidden @ weights[0] + bias[0]


def plain_loss(params: Params, before: Sequence[jax.Array]) -> jax.Array:
    """PPO's value loss, summed over both micro-batches with their weights."""
    total = jnp.zeros(())
    for micro, old in zip(micro_batches(), before, strict=True):
        values, returns = plain_values(params, micro.tokens), micro.columns["returns"]
        clipped = old + jnp.clip(values - old, -EPSILON, EPSILON)
        worse = jnp.maximum((values - returns) ** 2, (clipped - returns) ** 2)
        total += jnp.sum(micro.weights * 0.5 * worse)
    return total


def updated(trainer: Trainer, params: Any) -> tuple[Any, dict[str, float]]:
    """Parameters after two optimizer steps on one batch: by the second, values have moved."""
    state = trainer["init_state"](jax.device_put(params, trainer.shardings))
    batch = trainer.predict(state, TrainBatch([list(micro_batches())], 1.0))
    state, _ = trainer.update(state, batch)
    state, result = trainer.update(state, batch)
    assert result.applied == (True,)
    return jax.device_get(state.params), result.metrics


@cache
def plain_descent() -> tuple[Params, list[float], Params]:
    """Parameters after two steps, the loss before each, and the gradients of the second."""
    wanted, losses = weights_of(POLICY), []
    before = [plain_values(wanted, micro.tokens) for micro in micro_batches()]
    step = jax.jit(jax.value_and_grad(plain_loss))
    for _ in range(2):
        loss, grads = jax.device_get(step(wanted, before))
        losses.append(float(loss))
        wanted = jax.tree.map(lambda x, g: x - RATE * g, wanted, grads)
    return wanted, losses, grads


@pytest.mark.parametrize(
    "layout",
    [
        SINGLE,
        CHAIN["dp2tp4"],
        *(pytest.param(CHAIN[name], marks=pytest.mark.slow) for name in ("dp8tp1", "dp1tp8")),
        pytest.param(IN_GROUPS[4], marks=pytest.mark.slow),
    ],
    ids=["single", "dp2tp4", "dp8tp1", "dp1tp8", "groups"],
)
def test_an_update_is_plain_descent_on_the_value_loss_in_every_layout(layout: Layout):
    params, (wanted, losses, grads) = weights_of(POLICY), plain_descent()
    found, metrics = updated(critic(layout), params)
    assert metrics["critic/loss"] == pytest.approx(losses[1], rel=1e-5)
    assert losses[1] < losses[0]
    assert metrics["critic/grad_norm"] == pytest.approx(float(optax.tree.norm(grads)), rel=1e-4)
    moved = jax.tree.map(lambda x, y: np.asarray(x) - y, found, params)
    assert_trees_all_close(
        moved, jax.tree.map(lambda x, y: np.asarray(x) - y, wanted, params), rtol=2e-3, atol=2e-6
    )


def test_adapters_and_a_head_beside_a_frozen_base_learn_what_their_sum_would():
    """New adapters leave the critic as its base is; the head is trained whole, from the first step."""
    base = weights_of(POLICY)
    lora = Lora.of(POLICY, rank=2, alpha=4.0, targets=["all-linear"])
    trainer = critic(CHAIN["dp4tp2"], lora)
    trainer.freeze(jax.device_put(base, trainer.trained.base_shardings))
    adapters = jax.device_get(lora.init(0, base=base))
    before = [plain_values(base, micro.tokens) for micro in micro_batches()]
    wanted = adapters

    def loss(adapters: Any) -> jax.Array:
        return plain_loss(lora.merge(base, adapters), before)

    gradient = jax.jit(jax.grad(loss))
    for _ in range(2):
        grads = jax.device_get(gradient(wanted))
        wanted = jax.tree.map(lambda x, g: x - RATE * g, wanted, grads)
    found, metrics = updated(trainer, adapters)
    assert "train/update_seen" not in metrics and metrics["critic/explained_variance"] < 1
    head_moved = {name: np.abs(found[name]).max() for name in ("score", "score.bias")}
    assert min(head_moved.values()) > 1e-4
    assert max(np.abs(x.b).max() for name, x in found.items() if name not in head_moved) > 1e-6
    moved, expected = (
        jax.tree.map(lambda x, y: np.asarray(x) - y, tree, adapters) for tree in (found, wanted)
    )
    assert_trees_all_close(moved, expected, rtol=2e-3, atol=2e-6)


REFERENCE = Path(__file__).parent.parent / "models" / "reference"
PAD = 60  # of the recorded tokens


@cache
def recorded(case: str) -> tuple[list[np.ndarray], np.ndarray]:
    """Texts, and what transformers predicts at the last token of each."""
    found = load_file(REFERENCE / case / "expected.safetensors")
    texts = [row[row != PAD].astype(np.int32) for row in found["tokens"]]
    values = found["values"]
    if values.ndim > 1:
        values = np.array([row[len(text) - 1] for row, text in zip(values, texts, strict=True)])
    return texts, values


@cache
def scorer(case: str, num_devices: int, budget: int) -> TextScorer:
    devices = jax.devices()[:num_devices]
    policy = Policy.from_config(padded_for(devices, check_checkpoint(REFERENCE / case)))
    layout = next(iter(layout_chain(factored_mesh(devices), policy.config)[0].values()))
    held = TrainableParams(policy, layout)
    functions = model_functions(policy, layout, jnp.float32, remat="none")
    micro_shapes = shapes((32, 64), budget, layout.split.dp)
    predictor = Predictor(functions, policy.config.vocab_size)
    reader = Reader("score", held, predictor, micro_shapes)
    reader.params = load_params(REFERENCE / case, policy, held.shardings, jnp.float32)
    return TextScorer(reader, micro_shapes)


@pytest.mark.parametrize(
    ("case", "num_devices"),
    [("llama-sequence", 1), ("qwen2-sequence", 2), ("qwen3-sequence", 8), ("qwen3-token", 2)],
)
def test_packed_texts_have_the_scores_of_transformers(case, num_devices):
    texts, values = recorded(case)
    assert len(set(map(len, texts))) > 1
    score = scorer(case, num_devices, 128)
    tolerance = {"atol": 1e-5 * np.abs(values).max(), "rtol": 0}
    order = [0, 1, 1, 0, 0, 1, 0]  # several to a row, and several micro-batches
    found = score([texts[i] for i in order])
    assert found.dtype == np.float32
    np.testing.assert_allclose(found, values[order], **tolerance)
    alone = np.concatenate([score([texts[i]]) for i in order])
    np.testing.assert_allclose(alone, found, **tolerance)


def test_a_text_may_fill_a_row_to_its_end():
    texts, _ = recorded("llama-sequence")
    text = np.resize(texts[0], 64)
    score = scorer("llama-sequence", 1, 128)
    whole, shorter = score([text, text[:63]])
    assert whole == pytest.approx(score([text])[0], abs=1e-5) and whole != shorter
    with pytest.raises(ValueError, match="65"):
        score([np.resize(text, 65)])
