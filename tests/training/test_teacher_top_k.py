"""Updates towards a teacher's likeliest tokens: those of plain gradients, in every layout; what they send."""

import re
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from chex import assert_trees_all_close
from trainers import CHAIN, CONFIG, LENGTH, POLICY, ROWS, SINGLE, host_weights, micro_batches

from pat_jax.layout.chain import layout_chain
from pat_jax.layout.layout import Layout
from pat_jax.layout.mesh import factored_mesh
from pat_jax.models.policy import Params, Policy
from pat_jax.models.presets import preset
from pat_jax.planning.types import Split
from pat_jax.programs.programs import Key
from pat_jax.rl.algorithm.policy_loss import PolicyLoss
from pat_jax.rl.algorithm.predict import Predictor
from pat_jax.rl.algorithm.update import Update
from pat_jax.rl.batches.train_batch import TrainBatch
from pat_jax.training.passes import model_functions
from pat_jax.training.reader import Reader
from pat_jax.training.trainable_params import TrainableParams
from pat_jax.training.trainer import Trainer
from pat_jax.training.transfer import Receivers

K, COEF, RATE, TEMPERATURE = 5, 0.5, 1e-2, 0.8


def parts(name: str) -> tuple[Trainer, Reader]:
    """A policy's trainer and its teacher, whose logits exist for a few tokens at a time."""
    layout: Layout = CHAIN[name] if name else SINGLE
    model = model_functions(POLICY, layout, jnp.dtype(jnp.float32))
    predictor = Predictor(model, CONFIG.vocab_size, TEMPERATURE, logit_tokens=24)
    loss = PolicyLoss(is_on_policy=True, distill_coef=COEF, top_k=K)
    held, shapes = TrainableParams(POLICY, layout), [(ROWS, LENGTH)]
    # Plain descent: parameters move as their gradients say, not by their signs alone.
    update = Update(predictor, optax.sgd(RATE), loss)
    trainer = Trainer(held, update, Receivers(jnp.dtype(jnp.float32)), micro_shapes=shapes)
    return trainer, Reader("teacher_logprobs", held, predictor, shapes, top_k=K)


def teacher_weights() -> Params:
    rng = np.random.default_rng(9)
    return jax.tree.map(lambda x: x + 0.1 * rng.normal(size=x.shape), host_weights())


@jax.jit
def plain_logprobs(params: Params, tokens: np.ndarray) -> jax.Array:
    """By the model alone: no programs, no layout, no chunks."""
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
    model = POLICY.bind(params)
    logits = model.logits(model(jnp.asarray(tokens), positions).hidden)
    return jax.nn.log_softmax(logits[..., : CONFIG.vocab_size] / TEMPERATURE)


def plain_loss(params: Params, teacher: Params) -> jax.Array:
    total = jnp.zeros(())
    for micro in micro_batches():
        policy, other = (plain_logprobs(x, micro.tokens) for x in (params, teacher))
        log_q, ids = jax.lax.top_k(other, K)
        p, q = jnp.exp(jnp.take_along_axis(policy, ids, -1)), jnp.exp(log_q)
        rest, rest_q = 1 - p.sum(-1), 1 - q.sum(-1)
        kl = (p * jnp.log(p / q)).sum(-1) + rest * jnp.log(rest / rest_q)
        taken = jnp.roll(jnp.asarray(micro.tokens), -1, axis=1)[..., None]
        logprobs = jnp.take_along_axis(policy, taken, -1)[..., 0]
        total += jnp.sum(micro.weights * (COEF * kl - micro.columns["advantages"] * logprobs))
    return total


@pytest.fixture(scope="module")
def plain() -> tuple[float, Any]:
    """The loss and the gradient."""
    loss, gradient = jax.jit(jax.value_and_grad(plain_loss))(host_weights(), teacher_weights())
    return float(loss), jax.device_get(gradient)


@pytest.mark.parametrize("name", ["", "dp2tp4", pytest.param("dp1tp8", marks=pytest.mark.slow)])
def test_an_update_is_plain_descent_in_every_layout(name: str, plain: tuple[float, Any]):
    trainer, reader = parts(name)
    reader.params = jax.device_put(teacher_weights(), reader.held.shardings)
    batch = reader.read(TrainBatch([list(micro_batches())], 1.0))
    for micro in batch.mini_batches[0]:
        assert micro.teacher is not None and "teacher_logprobs" not in micro.columns
        # They wait in the host's memory: a whole iteration's would fill the devices.
        assert all(isinstance(x, np.ndarray) for x in jax.tree.leaves(micro.teacher))
        log_q, _ = jax.lax.top_k(plain_logprobs(teacher_weights(), micro.tokens), K)
        np.testing.assert_allclose(micro.teacher.logprobs, log_q, atol=1e-5)
    state = trainer["init_state"](jax.device_put(host_weights(), trainer.shardings))
    state, result = trainer.update(state, batch)
    assert result.applied == (True,) and result.metrics["train/teacher_kl"] > 0
    found = jax.tree.map(lambda x, y: (y - np.asarray(x)) / RATE, state.params, host_weights())
    loss, gradient = plain
    # On policy the ratio is 1: the loss has the advantage where the plain one has its logarithm.
    assert result.metrics["train/grad_norm"] == pytest.approx(
        float(optax.tree.norm(gradient)), rel=1e-5
    )
    assert_trees_all_close(found, gradient, rtol=1e-3, atol=2e-5)
    assert np.isfinite(loss)


def test_one_update_brings_the_policy_nearer():
    trainer, reader = parts("")
    reader.params = jax.device_put(teacher_weights(), reader.held.shardings)
    batch = reader.read(TrainBatch([list(micro_batches())], 1.0))
    batch = batch.with_column("advantages", [])  # zeros: the teacher alone teaches
    state, found = trainer["init_state"](jax.device_put(host_weights(), trainer.shardings)), []
    for _ in range(3):
        state, result = trainer.update(state, batch)
        found.append(result.metrics["train/teacher_kl"])
    assert found[0] > found[1] > found[2] > 0


GATHERS = re.compile(r" = (.*?) all-gather(?:-start)?\(")


@pytest.mark.parametrize("program", ["grad", "predict"])
def test_a_sharded_vocabulary_is_not_gathered(program: str):
    trainer, reader = parts("dp2tp4")
    table = trainer.programs if program == "grad" else reader.programs
    hlo = table.lower(Key(program, Split(2, 4), ROWS, LENGTH)).compile().as_text() or ""
    vocab = CONFIG.padded_vocab_size
    gathered = [shape for shape in GATHERS.findall(hlo) if re.search(rf",{vocab}[\],]", shape)]
    assert not gathered, gathered


# --- what is sent for the logits: the head and its gradient once, whatever the number of chunks ---

WIDE = preset("tiny", vocab_size=1000)  # no other weight has a dimension like it
WIDE_POLICY = Policy.from_config(WIDE)

SENDS = re.compile(r" = (.*?) (?:all-gather|all-reduce|reduce-scatter|all-to-all)(?:-start)?\(")


def sent(hlo: str) -> Iterator[tuple[bool, str]]:
    """Of each collective: whether it is outside of all loops and calls, and its result's shape."""
    is_entry = False
    for line in hlo.splitlines():
        if line.endswith("{") and "->" in line:
            is_entry = line.startswith("ENTRY")
        elif found := SENDS.search(line):
            yield is_entry, found[1]


@pytest.mark.parametrize(
    "split", [pytest.param(Split(8, 1), marks=pytest.mark.slow), Split(4, 2)], ids=str
)
def test_the_head_is_gathered_once(split: Split):
    layout = layout_chain(factored_mesh(jax.devices()), WIDE)[0][split]
    model = model_functions(WIDE_POLICY, layout, jnp.float32)
    predictor = Predictor(model, WIDE.vocab_size, logit_tokens=16)
    update = Update(predictor, optax.sgd(1.0), PolicyLoss())
    trainer = Trainer(
        TrainableParams(WIDE_POLICY, layout),
        update,
        Receivers(jnp.float32, {split: layout}),
        micro_shapes=[(8, 64)],
    )
    hlo = trainer.programs.lower(Key("grad", split, 8, 64)).compile().as_text() or ""
    vocab = WIDE.padded_vocab_size // split.tp
    shape = re.compile(rf"\[(?:{vocab},{WIDE.embed_dim}|{WIDE.embed_dim},{vocab})\]")
    heads = [is_entry for is_entry, shapes in sent(hlo) if shape.search(shapes)]
    assert heads and all(heads), heads
    assert "while(" in hlo  # there are several chunks
