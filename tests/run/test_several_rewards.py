"""Rewards of several functions on their way to advantages, against formulas in float64, and how they are shaped."""

import json
from typing import Any

import numpy as np
import pytest
from rollouts import group_of

from pat_jax.config.algorithms import ALGORITHMS
from pat_jax.config.learning import AlgorithmConfig
from pat_jax.engine.record.report import RolloutReport
from pat_jax.rl.batches.types import Prompt, RolloutGroup
from pat_jax.rl.rewards.outcome import Cause, Failure
from pat_jax.rl.rewards.weighted_sum import FunctionScores, weighted_sum
from pat_jax.run.collect import Drawn
from pat_jax.run.learning import training_batch
from pat_jax.run.start.shaping import KL_OF_A_TOKEN, Shaping

GROUPS, SAMPLES = 3, 4
RNG = np.random.default_rng(0)
SCORES = np.stack([RNG.random((GROUPS, SAMPLES)), 50 * RNG.random((GROUPS, SAMPLES))])
WEIGHTS = (2.0, 0.5)
NONE = Failure(Cause.NONE, "does not apply")


def groups() -> list[RolloutGroup]:
    prompts = [Prompt(number, (1, 2), "", {}) for number in range(GROUPS)]
    return [group_of([range(1 + i) for i in range(SAMPLES)], prompt) for prompt in prompts]


def drawn_with(*scores: Any, weights=WEIGHTS) -> Drawn:
    """A batch as the scorer makes it, from lists of scores and failures."""
    rows = [[x for group in one for x in group] for one in scores]
    functions = [
        FunctionScores(f"f{i}", f"f{i}", weight, row, [{}] * len(row))
        for i, (weight, row) in enumerate(zip(weights, rows, strict=True))
    ]
    rewards, failures = weighted_sum(functions)
    shaped = rewards.reshape(GROUPS, SAMPLES)
    return Drawn(groups(), RolloutReport(), shaped, failures, functions, 0.0)


def advantages(drawn: Drawn, name: str = "grpo", **options: Any) -> np.ndarray:
    """The advantage of each response: the same at all of its tokens."""
    algorithm = AlgorithmConfig(mini_batch_size=GROUPS, **ALGORITHMS[name], **options)
    batch, _ = training_batch(
        algorithm,
        drawn.scored,
        drawn.rewards,
        lambda batch: batch,
        beta=0.0,
        micro_shapes=[(4, 16)],
        longest=8,
    )
    found = batch.by_response("advantages")
    for each in found:
        np.testing.assert_array_equal(each, each[0])
    return np.array([each[0] for each in found]).reshape(GROUPS, SAMPLES)


def compared(rewards: np.ndarray) -> np.ndarray:
    """GRPO's advantages, arXiv 2402.03300."""
    centred = rewards - np.nanmean(rewards, axis=1, keepdims=True)
    return centred / (np.nanstd(rewards, axis=1, ddof=1, keepdims=True) + 1e-6)


def test_gdpo_compares_each_function_and_then_normalises_the_sum():
    found = advantages(drawn_with(*SCORES.tolist()), name="gdpo")
    total = WEIGHTS[0] * compared(SCORES[0]) + WEIGHTS[1] * compared(SCORES[1])
    expected = (total - total.mean()) / total.std(ddof=1)
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)
    plain = advantages(drawn_with(*SCORES.tolist()))
    np.testing.assert_allclose(plain, compared(2 * SCORES[0] + 0.5 * SCORES[1]), rtol=1e-4)
    assert np.abs(plain - found).max() > 0.1


def test_what_has_no_reward_counts_in_no_function_and_what_does_not_apply_in_its_own():
    first, second = SCORES.tolist()
    first[0][1], second[2][3] = Failure(Cause.NOT_A_NUMBER, "broke"), NONE
    found = advantages(drawn_with(first, second), name="gdpo")
    by_hand = SCORES.copy()
    by_hand[:, 0, 1], by_hand[1, 2, 3] = np.nan, np.nan
    total = np.nansum([w * compared(x) for w, x in zip(WEIGHTS, by_hand, strict=True)], axis=0)
    total[0, 1] = np.nan
    expected = (total - np.nanmean(total)) / np.nanstd(total, ddof=1)
    np.testing.assert_allclose(found, np.nan_to_num(expected), rtol=1e-5, atol=1e-6)


def test_a_group_teaches_gdpo_if_one_function_tells_its_responses_apart():
    opposed, same = [0.0, 1.0, 0.0, 1.0], [1.0] * SAMPLES
    turned = [1 - x for x in opposed]
    scores = drawn_with([opposed, same, same], [turned, same, opposed], weights=(1.0, 1.0))
    assert scores.scored.by_function.has_signal.tolist() == [True, False, True]
    only_measured = drawn_with([same] * 3, [opposed] * 3, weights=(1.0, 0.0))
    assert only_measured.scored.by_function.has_signal.tolist() == [False] * 3
    assert advantages(scores, name="gdpo")[1].tolist() == [0.0] * SAMPLES


def options(beta: float = 0.1, target: float = 0.5) -> AlgorithmConfig:
    parts = {**ALGORITHMS["ppo"], **({"kl_horizon": 100} if target else {})}
    return AlgorithmConfig(name="ppo", beta=beta, kl_target=target, **parts)


@pytest.mark.parametrize(
    ("resumed", "expected"),
    [
        (options(), 0.1 * 1.02),
        (options(beta=0.3), 0.3),  # another weight is asked for
        (options(target=0.0), 0.1),  # a weight that stays
    ],
)
def test_the_weight_of_the_penalty_goes_on_if_its_option_is_the_same(
    resumed: AlgorithmConfig, expected: float
):
    shaping = Shaping.of(options(), {}).after({KL_OF_A_TOKEN: 9.0}, 10)
    meta = json.loads(json.dumps(shaping.to_meta()))
    again = Shaping.of(resumed, meta)
    assert again.kl.beta == pytest.approx(expected, rel=1e-12)
    # It is still the weight of a run that is resumed once more.
    assert Shaping.of(resumed, again.to_meta()) == again
