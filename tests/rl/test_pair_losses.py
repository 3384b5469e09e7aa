"""Losses of pairs, of reward models and of policies: TRL's own numbers, and their papers' formulas."""

import json
from itertools import chain
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pat_jax.evaluation.pair_rewards import PairRewards
from pat_jax.rl.algorithm.losses import ENTROPY, LOGPROBS, VALUES, Loss
from pat_jax.rl.algorithm.pair_loss import DPOLoss, PairLoss
from pat_jax.rl.algorithm.preferences import MARGIN, agreement, sums_by_text, to_pair_batch
from pat_jax.rl.batches.batches import token_weights
from pat_jax.rl.batches.train_batch import TrainBatch
from pat_jax.rl.data.examples import Example, Pair

# Made by trl_losses.py; test_trl_parity.py holds it against TRL.
TRL = json.loads(Path(__file__).with_name("recorded_trl.json").read_text(encoding="utf-8"))
GIVEN = TRL["given"]
LENGTHS = [[len(x) for x in pair] for pair in GIVEN["logprobs"]]
PAIRS = len(LENGTHS)
ROWS = ((0, 1, 2), (3, 4))  # the pairs in each row
WIDTH = 32


def packed() -> tuple[np.ndarray, np.ndarray, list[list[tuple[int, slice]]]]:
    """The numbers of responses, weights of DPO, and where each response is: row and positions.

    Two tokens of a prompt come before each response."""
    responses, weights = np.zeros((len(ROWS), WIDTH), np.int32), np.zeros((len(ROWS), WIDTH))
    of_each = iter(token_weights(list(chain(*LENGTHS)), "sequence", 0))
    places = []
    for row, pairs in enumerate(ROWS):
        at, number = 0, 0
        for pair in pairs:
            places.append([])
            for length in LENGTHS[pair]:
                at, number = at + 2, number + 1
                where = slice(at, at + length)
                responses[row, where], weights[row, where] = number, next(of_each)
                places[-1].append((row, where))
                at += length
    return responses, weights, places


RESPONSES, TOKEN_WEIGHTS, PLACES = packed()
ENDS = np.zeros((len(ROWS), WIDTH), bool)
for row, where in chain(*PLACES):
    ENDS[row, where.stop - 1] = True
END_WEIGHTS = ENDS / (2 * PAIRS)


def spread(values: list[list[Any]]) -> np.ndarray:
    """Values by pair and response, at its tokens; NaN, which has no influence, elsewhere."""
    filled = np.full(RESPONSES.shape, np.nan)
    for places, pair in zip(PLACES, values, strict=True):
        for (row, where), each in zip(places, pair, strict=True):
            filled[row, where] = each
    return filled


def run(loss: Loss, weights, of: str, predicted, **columns) -> tuple[float, np.ndarray, dict]:
    """The loss, its gradient in the prediction `of`, and its metrics."""
    read = {name: jnp.asarray(x, jnp.float32) for name, x in columns.items()}
    others = {name: jnp.full(RESPONSES.shape, 0.5) for name in loss.predicted}

    def total(x):
        weight = jnp.asarray(weights, jnp.float32)
        return loss(others | {of: x}, read, weight, jnp.asarray(RESPONSES))

    with jax.numpy_dtype_promotion("strict"):
        (value, sums), gradient = jax.jit(jax.value_and_grad(total, has_aux=True))(
            jnp.asarray(predicted, jnp.float32)
        )
    return float(value), np.asarray(gradient), loss.summary([jax.device_get(sums)])


def assert_metrics(found: dict[str, float], wanted: dict[str, float]) -> None:
    for name, value in wanted.items():
        assert found[name] == pytest.approx(value, abs=1e-5), name


# --- reward models -------------------------------------------------------------------------------


@pytest.mark.parametrize("recorded", TRL["reward"], ids=lambda one: str(one["case"]))
def test_loss_gradient_and_metrics_of_a_reward_model_are_trls(recorded: dict):
    case = recorded["case"]
    loss = PairLoss(case.get("center_coef", 0.0), has_margin="margin" in case)
    columns = {"margin": spread([[x, x] for x in GIVEN["margins"]])} if "margin" in case else {}
    # Values of tokens before the last are not read.
    values = np.where(ENDS, spread(GIVEN["rewards"]), 1e9)
    value, gradient, metrics = run(loss, END_WEIGHTS, VALUES, values, **columns)
    assert value == pytest.approx(recorded["loss"], abs=1e-6)
    at_ends = np.where(ENDS, spread(recorded["gradient"]), 0.0)
    np.testing.assert_allclose(gradient, at_ends, atol=1e-6)
    assert_metrics(metrics, recorded["metrics"])
    assert metrics.keys() == set(loss.metrics)
    chosen, rejected = np.transpose(GIVEN["rewards"])
    assert_metrics(metrics, {"chosen_reward": chosen.mean(), "rejected_reward": rejected.mean()})


def test_equal_rewards_cost_log_two_and_are_not_accurate():
    value, gradient, metrics = run(PairLoss(), END_WEIGHTS, VALUES, np.ones(RESPONSES.shape))
    assert value == pytest.approx(np.log(2), rel=1e-6) and metrics["accuracy"] == pytest.approx(0.5)
    pushed = np.where(ENDS, np.where(RESPONSES % 2, -1, 1), 0) * 0.5 / PAIRS
    np.testing.assert_allclose(gradient, pushed, atol=1e-7)


@pytest.mark.parametrize("apart", [-1e30, -1e4, 1e4, 1e30])
def test_loss_and_gradient_are_finite_however_far_apart_rewards_are(apart: float):
    rewards = spread([[apart, 0.0]] * PAIRS)
    value, gradient, _ = run(PairLoss(), END_WEIGHTS, VALUES, rewards)
    assert value == pytest.approx(max(0.0, -apart), rel=1e-6)
    first = gradient[ENDS][0]
    assert first == pytest.approx(-1 / PAIRS if apart < 0 else 0.0)


# --- policies ------------------------------------------------------------------------------------


@pytest.mark.parametrize("recorded", TRL["dpo"], ids=lambda one: str(one["beta"]))
def test_loss_gradient_and_metrics_of_dpo_are_trls(recorded: dict):
    loss, reference = DPOLoss(recorded["beta"]), spread(GIVEN["reference"])
    value, gradient, metrics = run(
        loss, TOKEN_WEIGHTS, LOGPROBS, spread(GIVEN["logprobs"]), reference_logprobs=reference
    )
    assert value == pytest.approx(recorded["loss"], abs=1e-6)
    wanted = np.nan_to_num(spread(recorded["gradient"]))
    np.testing.assert_allclose(gradient, wanted, atol=1e-6)
    assert np.abs(wanted).max() > 1e-3
    assert_metrics(metrics, recorded["metrics"] | {ENTROPY: 0.5})
    assert metrics.keys() == set(loss.metrics)


# --- random pairs in packed rows, against the formulas --------------------------------------------

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
    assert found["accuracy"] == 0.625 and found["margin"] == 1.0  # an equal pair is right by half
    assert (found["chosen_reward"], found["rejected_reward"]) == (2.0, 1.0)


def test_a_pair_without_a_number_is_not_accurate():
    rewards = np.array([[1.0, 0.0]] * (PAIRS - 1) + [[np.nan, 0.0]])
    right = pytest.approx((PAIRS - 1) / PAIRS)
    with np.errstate(invalid="ignore"):  # of the loss
        assert agreement(rewards)["accuracy"] == right
    assert PairRewards("set", rewards, np.zeros(PAIRS), ()).accuracy.value == right
    filled = spread(rewards.tolist())
    assert run(PairLoss(), END_WEIGHTS, VALUES, filled)[2]["accuracy"] == right
    of_tokens = run(DPOLoss(), TOKEN_WEIGHTS, LOGPROBS, filled, reference_logprobs=filled * 0)
    assert of_tokens[2]["accuracy"] == right


def test_equal_rewards_are_right_by_half_as_in_the_area_under_a_curve():
    """Of one chosen text against each rejected one, the accuracy is the AUC (Mann and Whitney)."""
    rejected = np.random.default_rng(0).integers(0, 4, 40).astype(float)
    rewards = np.stack([np.full(40, 2.0), rejected], axis=1)
    thresholds = np.unique([*rejected, np.inf])[::-1]
    false_positives = [(rejected >= t).mean() for t in thresholds]
    true_positives = [float(t <= 2.0) for t in thresholds]
    area = np.trapezoid(true_positives, false_positives)
    assert agreement(rewards)["accuracy"] == pytest.approx(area)
