"""Pairs in packed rows: what the losses of pairs make of them, against their formulas in NumPy."""

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pat_jax.rl.algorithm.dpo_loss import DPOLoss
from pat_jax.rl.algorithm.losses import ENTROPY, LOGPROBS, VALUES, Loss
from pat_jax.rl.algorithm.pair_loss import PairLoss
from pat_jax.rl.algorithm.preferences import MARGIN, agreement, sums_by_text, to_pair_batch
from pat_jax.rl.batches.train_batch import TrainBatch
from pat_jax.rl.data.examples import Example, Pair

SHAPES = [(2, 24), (4, 48)]
BETA, SMOOTHING, CENTER = 0.3, 0.1, 0.05


def made(seed: int, *, is_scored: bool) -> list[Pair]:
    """Pairs of random tokens, each of which occurs once, so that a token tells where it is from."""
    random, token = np.random.default_rng(seed), iter(range(1, 10_000))

    def text(length: int) -> Example:
        in_loss = random.random(length) < 0.6
        in_loss[0], in_loss[-1] = False, True
        if is_scored:
            in_loss[:-1] = False
        return Example(np.array([next(token) for _ in range(length)], np.int32), in_loss)

    lengths = random.integers(2, 25, (random.integers(1, 9), 2)).tolist()
    return [Pair(text(a), text(b), random.normal()) for a, b in lengths]


def predicted(batch: TrainBatch, at: str, values: np.ndarray, column: str) -> TrainBatch:
    """A column with a value for each token, wherever it is."""
    for micro in batch.mini_batches[0]:
        tokens = micro.tokens if at == "token" else np.roll(micro.tokens, -1, axis=1)
        micro.columns[column] = np.where(micro.responses > 0, values[tokens], np.nan)
    return batch


def total(loss: Loss, batch: TrainBatch, given: str) -> float:
    found = 0.0
    for micro in batch.mini_batches[0]:
        others = {ENTROPY: jnp.zeros(micro.tokens.shape)}
        value, _ = loss(
            {**others, given: jnp.asarray(micro.columns[given])},
            {name: jnp.asarray(x) for name, x in micro.columns.items()},
            jnp.asarray(micro.weights),
            jnp.asarray(micro.responses),
        )
        found += float(value)
    return found


@given(st.integers(0, 10**6))
def test_rewards_of_packed_pairs(seed: int):
    pairs = made(seed, is_scored=True)
    values = np.random.default_rng(seed).normal(size=10_000)
    batch = predicted(to_pair_batch(pairs, SHAPES, "token"), "token", values, VALUES)
    last = np.array([[values[x.tokens[-1]] for x in (p.chosen, p.rejected)] for p in pairs])
    margins = np.array([pair.margin for pair in pairs])
    np.testing.assert_allclose(sums_by_text(batch, VALUES), last, rtol=1e-6)
    np.testing.assert_allclose(sums_by_text(batch, MARGIN)[:, 0], margins, rtol=1e-6)

    apart = last[:, 0] - last[:, 1]
    wanted = np.mean(np.log1p(np.exp(margins - apart)))
    assert agreement(last, margins=margins)["loss"] == pytest.approx(wanted, rel=1e-9)
    centred = wanted + CENTER * np.mean(last.sum(axis=1) ** 2)
    assert total(PairLoss(CENTER, True), batch, VALUES) == pytest.approx(centred, rel=1e-5)


@given(st.integers(0, 10**6))
def test_log_probabilities_of_packed_pairs(seed: int):
    pairs = made(seed, is_scored=False)
    both = np.random.default_rng(seed).normal(size=(2, 10_000))
    batch = to_pair_batch(pairs, SHAPES, "target")
    for name, values in zip((LOGPROBS, "reference_logprobs"), both, strict=True):
        batch = predicted(batch, "target", values, name)

    def reward(text: Example) -> float:
        own = text.tokens[text.in_loss]
        return BETA * float((both[0][own] - both[1][own]).sum())

    rewards = np.array([[reward(pair.chosen), reward(pair.rejected)] for pair in pairs])
    found = sums_by_text(batch, LOGPROBS) - sums_by_text(batch, "reference_logprobs")
    np.testing.assert_allclose(BETA * found, rewards, rtol=1e-4, atol=1e-5)
    apart = rewards[:, 0] - rewards[:, 1]
    wrong = SMOOTHING * np.log1p(np.exp(apart))
    wanted = np.mean((1 - SMOOTHING) * np.log1p(np.exp(-apart)) + wrong)
    assert agreement(rewards, label_smoothing=SMOOTHING)["loss"] == pytest.approx(wanted, rel=1e-9)
    assert total(DPOLoss(BETA, SMOOTHING), batch, LOGPROBS) == pytest.approx(wanted, rel=1e-4)


@given(st.integers(0, 10**6))
def test_every_token_is_there_once_and_pairs_weigh_the_same(seed: int):
    pairs = made(seed, is_scored=False)
    batch = to_pair_batch(pairs, SHAPES, "target")
    tokens = [token for micro in batch.mini_batches[0] for token in micro.tokens[micro.tokens > 0]]
    expected = [token for p in pairs for x in (p.chosen, p.rejected) for token in x.tokens]
    assert sorted(tokens) == expected
    weights = [micro.weights for micro in batch.mini_batches[0]]
    of_texts = [weights[at.micro][at.row, at.targets].sum() for at in batch.places]
    np.testing.assert_allclose(of_texts, 1 / len(of_texts), rtol=1e-5)


def test_agreement_of_known_rewards():
    found = agreement(np.array([[2.0, 1.0], [0.0, 0.0], [1.0, 3.0], [5.0, 0.0]]))
    assert found["accuracy"] == 0.5 and found["margin"] == 1.0  # an equal pair is not right
    assert (found["chosen_reward"], found["rejected_reward"]) == (2.0, 1.0)
