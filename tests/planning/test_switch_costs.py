"""What is believed of switches, against Bayesian regression with its parts written out."""

import numpy as np
import pytest
from fakes import SPLITS
from hypothesis import given
from hypothesis import strategies as st

from pat_jax.planning.latency.switch_costs import FADING, LEAST, NOISE, OWN, SeenSwitch, SwitchCosts

DP8, DP4TP2, DP2TP4, TP8 = SPLITS
PROFILE = np.where(np.eye(4, dtype=bool), 0.0, 0.05)  # reshard, seconds

pairs = st.sampled_from([(a, b) for a in SPLITS for b in SPLITS if a != b])
seconds = st.floats(0.01, 1.0)
switches = st.builds(
    lambda pair, carry, reshard, kv, ratio: SeenSwitch(
        pair[0], pair[1], carry, reshard, kv, ratio * (reshard + kv)
    ),
    pairs,
    st.sampled_from(["migrate", "recompute"]),
    seconds,
    seconds,
    st.floats(0.3, 20),
)


def parts(source, target, carry, reshard_s, kv_s) -> np.ndarray:
    """Of one switch: the fixed part, what is common, that of each pair and of each way."""
    pair = np.zeros((4, 4))
    pair[SPLITS.index(source), SPLITS.index(target)] = reshard_s
    way = kv_s * np.array([carry == "migrate", carry == "recompute"])
    return np.concatenate([[1.0, reshard_s + kv_s], pair.ravel(), way])


def regression(seen: tuple[SeenSwitch, ...]) -> np.ndarray:
    """The mean of the parts' sizes given what was seen: ridge regression, float64."""
    features = np.array(
        [parts(one.source, one.target, one.carry, one.reshard_s, one.kv_s) for one in seen]
    )
    size = np.mean([one.profile_s for one in seen])
    prior = np.concatenate([[size, 1.0], np.full(18, OWN)]) ** 2
    noise = np.array([NOISE * one.profile_s * (1 + FADING * one.age) for one in seen]) ** 2
    excess = np.array([one.actual_s - one.profile_s for one in seen])
    precision = np.diag(1 / prior) + features.T @ (features / noise[:, None])
    return np.linalg.solve(precision, features.T @ (excess / noise))


@given(st.lists(switches, min_size=1, max_size=6))
def test_it_is_bayesian_regression(seen):
    costs = SwitchCosts(tuple(seen))
    fixed, common, *own = regression(costs.seen)
    pair, way = np.reshape(own[:16], (4, 4)), {"migrate": own[16], "recompute": own[17]}
    expected = np.maximum(LEAST * PROFILE, PROFILE * (1 + common + pair) + fixed)
    believed = costs.reshard(SPLITS, PROFILE)
    np.testing.assert_allclose(believed[PROFILE > 0], expected[PROFILE > 0], rtol=1e-6)
    assert (np.diag(believed) == 0).all()
    for carry in ("migrate", "recompute"):
        assert costs.kv(carry) == pytest.approx(max(LEAST, 1 + common + way[carry]), rel=1e-6)


def test_what_was_seen_long_ago_is_forgotten():
    costs = SwitchCosts().observed(SeenSwitch(DP8, TP8, "migrate", 0.05, 0.0, 1.0))
    believed = []
    for _ in range(300):
        believed.append(costs.reshard(SPLITS, PROFILE)[0, 3])
        costs = costs.aged()
    assert (np.diff(believed) < 0).all()
    assert believed[0] > 0.95 and believed[10] > 0.8 and believed[-1] < 0.15


@given(st.lists(switches, min_size=40, max_size=40))
def test_the_past_is_bounded_and_no_switch_is_free(seen):
    costs = SwitchCosts()
    for one in seen:
        costs = costs.observed(one)
    assert len(costs.seen) == 32 and costs.seen[-1] == seen[-1]
    assert (costs.reshard(SPLITS, PROFILE) >= LEAST * PROFILE).all()
    assert min(costs.kv("migrate"), costs.kv("recompute")) >= LEAST


@given(st.lists(st.sampled_from([0.0, 1e-12, 0.05]), min_size=1, max_size=6))
def test_switches_that_the_profile_takes_for_free_are_no_division_by_zero(profile_s):
    model = SwitchCosts()
    for kv_s in profile_s:
        model = model.observed(SeenSwitch(DP8, TP8, "migrate", 0.0, kv_s, actual_s=kv_s))
    assert np.isfinite(model.reshard(SPLITS, PROFILE)).all()
    assert model.kv("migrate") == pytest.approx(1.0) and np.isfinite(model.pages(0.05))
