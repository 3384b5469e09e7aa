"""Losses of pairs, of reward models and of policies: TRL's own numbers, and their papers' formulas."""

import json
from itertools import chain
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pat_jax.rl.algorithm.dpo_loss import DPOLoss
from pat_jax.rl.algorithm.losses import ENTROPY, LOGPROBS, VALUES, Loss
from pat_jax.rl.algorithm.pair_loss import PairLoss
from pat_jax.rl.batches.aggregation import token_weights

# Made by trl_losses.py; test_trl_losses_parity.py holds it against TRL.
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


def test_the_pair_loss_is_the_papers():
    """arXiv 2307.09288, eq. 2, in float64, and centring."""
    loss = PairLoss(0.3, has_margin=True)
    margins = spread([[x, x] for x in GIVEN["margins"]])
    value, _, _ = run(loss, END_WEIGHTS, VALUES, spread(GIVEN["rewards"]), margin=margins)
    wanted = 0.0
    for (chosen, rejected), margin in zip(GIVEN["rewards"], GIVEN["margins"], strict=True):
        wins = 1 / (1 + np.exp(-(chosen - rejected - margin)))
        wanted += (-np.log(wins) + 0.3 * (chosen + rejected) ** 2) / PAIRS
    assert value == pytest.approx(wanted, rel=1e-6)


def test_equal_rewards_cost_log_two_and_are_not_accurate():
    value, gradient, metrics = run(PairLoss(), END_WEIGHTS, VALUES, np.ones(RESPONSES.shape))
    assert value == pytest.approx(np.log(2), rel=1e-6) and metrics["accuracy"] == 0
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


@pytest.mark.parametrize("smoothing", [0.0, 0.1, 0.5])
def test_dpo_with_label_smoothing_is_the_papers(smoothing: float):
    """In float64, with the gradient from the definition of the loss."""
    beta, wanted, gradients = 0.3, 0.0, []
    for (chosen, rejected), (of_chosen, of_rejected) in zip(
        GIVEN["logprobs"], GIVEN["reference"], strict=True
    ):
        h = beta * (sum(chosen) - sum(of_chosen) - sum(rejected) + sum(of_rejected))
        wins = 1 / (1 + np.exp(-h))
        wanted -= ((1 - smoothing) * np.log(wins) + smoothing * np.log(1 - wins)) / PAIRS
        slope = beta * (wins - (1 - smoothing)) / PAIRS
        gradients.append([slope, -slope])
    value, gradient, _ = run(
        DPOLoss(beta, smoothing),
        TOKEN_WEIGHTS,
        LOGPROBS,
        spread(GIVEN["logprobs"]),
        reference_logprobs=spread(GIVEN["reference"]),
    )
    assert value == pytest.approx(wanted, rel=1e-6)
    np.testing.assert_allclose(gradient, np.nan_to_num(spread(gradients)), atol=1e-6)


def test_a_policy_that_is_its_reference_has_no_preference():
    logprobs = spread(GIVEN["logprobs"])
    value, _, metrics = run(
        DPOLoss(), TOKEN_WEIGHTS, LOGPROBS, logprobs, reference_logprobs=logprobs
    )
    assert value == pytest.approx(np.log(2), rel=1e-6)
    assert metrics["margin"] == metrics["accuracy"] == metrics["chosen_reward"] == 0


@pytest.mark.parametrize("is_policy", [True, False])
def test_a_pair_is_the_same_in_any_row(is_policy: bool):
    """Rows one by one, as micro-batches, add up to both together."""
    loss = DPOLoss() if is_policy else PairLoss(0.1)
    weights = TOKEN_WEIGHTS if is_policy else END_WEIGHTS
    of, name = (LOGPROBS, "logprobs") if is_policy else (VALUES, "rewards")
    columns = {"reference_logprobs": spread(GIVEN["reference"])} if is_policy else {}
    whole, gradient, _ = run(loss, weights, of, spread(GIVEN[name]), **columns)
    parts = [
        run(loss, weights * (np.arange(2) == row)[:, None], of, spread(GIVEN[name]), **columns)
        for row in range(2)
    ]
    assert sum(part[0] for part in parts) == pytest.approx(whole, rel=1e-6)
    np.testing.assert_allclose(sum(part[1] for part in parts), gradient, atol=1e-7)
