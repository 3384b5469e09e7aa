"""The loss of the critic: its paper's formula in float64, and verl's own numbers."""

import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pat_jax.rl.algorithm.losses import VALUES
from pat_jax.rl.algorithm.value_loss import ValueLoss

# Made by make_critic_reference.py.
VERL = json.loads(Path(__file__).with_name("recorded_critic.json").read_text(encoding="utf-8"))
LENGTHS = [len(each) for each in VERL["values"]]
WIDTH = max(LENGTHS) + 2
MASK = np.array([[1 <= t < 1 + n for t in range(WIDTH)] for n in LENGTHS])
WEIGHTS = MASK / MASK.sum()


def padded(name: str) -> np.ndarray:
    filled = np.zeros(MASK.shape)
    filled[MASK] = np.concatenate(VERL[name])
    return filled


def run(loss: ValueLoss, value, weights=WEIGHTS, **columns) -> tuple[float, np.ndarray, Any]:
    """The loss, its gradient in the values, and its sums."""
    read = {name: jnp.asarray(padded(alias), jnp.float32) for name, alias in NAMES.items()}
    read |= {name: jnp.asarray(x, jnp.float32) for name, x in columns.items()}

    def of(value):
        return loss({VALUES: value}, read, jnp.asarray(weights, jnp.float32))

    with jax.numpy_dtype_promotion("strict"):
        (total, sums), gradient = jax.jit(jax.value_and_grad(of, has_aux=True))(
            jnp.asarray(value, jnp.float32)
        )
    return float(total), np.asarray(gradient), sums


NAMES = {"returns": "returns", "old_values": "values"}


def test_loss_gradient_and_clip_fraction_are_verls():
    wanted = VERL["value_loss"]
    loss = ValueLoss(epsilon=wanted["clip"])
    total, gradient, sums = run(loss, padded("predicted"))
    assert total == pytest.approx(wanted["loss"], abs=1e-6)
    np.testing.assert_allclose(gradient[MASK], np.concatenate(wanted["gradient"]), atol=1e-6)
    assert not gradient[~MASK].any() and 0 < wanted["clip_fraction"] < 1
    found = loss.summary([jax.device_get(sums)])
    assert found["clip_fraction"] == pytest.approx(wanted["clip_fraction"], abs=1e-6)
    assert found["loss"] == pytest.approx(total, abs=1e-6)


def test_without_a_clip_it_is_half_the_mean_squared_error():
    value, returns = padded("predicted"), padded("returns")
    loss = ValueLoss(epsilon=0.0)
    total, gradient, sums = run(loss, value)
    errors = value[MASK] - returns[MASK]
    assert total == pytest.approx(0.5 * np.mean(errors**2), rel=1e-6)
    np.testing.assert_allclose(gradient[MASK], errors / MASK.sum(), atol=1e-7)
    assert loss.summary([jax.device_get(sums)])["clip_fraction"] == 0


def test_the_clip_stops_values_that_moved_far_towards_the_return_and_no_other():
    """V_old = 0 and ε = 1; R = 3 in the first row, -3 in the second."""
    value = np.array([[0.0, 0.9, 2.0, -2.0], [0.0, -0.9, -2.0, 2.0]])
    returns = np.array([[3.0], [-3.0]]) * np.ones((1, 4))
    weights = np.full((2, 4), 1 / 8)
    total, gradient, _ = run(ValueLoss(1.0), value, weights, returns=returns, old_values=0 * value)
    free = np.array([1, 1, 0, 1])
    np.testing.assert_allclose(gradient, free * (value - returns) / 8, rtol=1e-6)
    errors = [9, 2.1**2, 4, 25]
    assert total == pytest.approx(0.5 * np.mean(errors), rel=1e-6)


def test_over_micro_batches_the_metrics_are_those_of_all_tokens():
    loss, value = ValueLoss(), padded("predicted")
    total = loss.zero_sums()
    for rows in ([0, 3], [1], [2, 4]):
        part = np.where(np.isin(np.arange(len(LENGTHS)), rows)[:, None], WEIGHTS, 0)
        total = loss.add(total, run(loss, value, part)[2])
    found = loss.summary([jax.device_get(total)])
    returns, old = padded("returns")[MASK], padded("values")[MASK]
    expected = {
        "return_mean": returns.mean(),
        "value_mean": value[MASK].mean(),
        "explained_variance": 1 - np.var(returns - old) / np.var(returns),
    }
    assert found.keys() == {"loss", "clip_fraction", *expected}
    for name, wanted in expected.items():
        assert found[name] == pytest.approx(wanted, abs=1e-5), name


@pytest.mark.parametrize("level", [0.0, 0.1, 30.0])
def test_explained_variance_of_good_and_bad_critics(level: float):
    returns = level + padded("returns")

    def explained(old: np.ndarray, returns: np.ndarray = returns) -> float:
        _, _, sums = run(ValueLoss(), old, returns=returns, old_values=old)
        return ValueLoss().summary([jax.device_get(sums)])["explained_variance"]

    assert explained(returns) == pytest.approx(1.0, abs=1e-6)
    assert explained(np.full_like(returns, level)) == pytest.approx(0.0, abs=0.1)
    assert explained(3 * level - 2 * returns) < -5
    assert np.isnan(explained(returns, np.full_like(returns, level)))


def test_nothing_in_the_loss_gives_zero_and_metrics_that_are_nan():
    nothing = np.full(MASK.shape, np.nan)
    total, gradient, sums = run(ValueLoss(), nothing, 0 * WEIGHTS, returns=nothing)
    assert total == 0 and not gradient.any()
    assert all(np.isnan(x) for x in ValueLoss().summary([jax.device_get(sums)]).values())
