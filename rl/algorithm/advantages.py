"""Advantages: how much better responses are than their siblings. Knows rewards, not tokens; runs on
the host."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from jaxtyping import Bool, Float, Int

_OF_VARIANCE = 1e-8  # added to a variance before its root is taken
Baseline = Literal["group", "leave_one_out", "length_weighted", "none"]
Scale = Literal["group", "batch", "none"]
# Relative to the largest reward: a few units in the last digit of float32, the dtype of rewards.
ROUNDING = 4 * float(np.finfo(np.float32).eps)
_EPSILON = 1e-6  # in units of the reward: keeps nearly equal rewards from being blown up


def whitened(
    values: Sequence[Float[np.ndarray, " _"]], *, shift_mean: bool = True
) -> list[Float[np.ndarray, " _"]]:
    """Returns values scaled to variance 1 over all tokens, with mean 0 or the mean that they had.
    They are float64 in the shapes of `values`.

        (x - μ) / sqrt(σ² + ε)          shift_mean = True (advantages)
        (x - μ) / sqrt(σ² + ε) + μ      shift_mean = False (rewards)

    σ² is the sample variance, with Bessel's correction n / (n - 1), as verl and TRL compute it. A
    single token has σ = 0.

    Args:
      values: one array for each response. NaN stays NaN, and counts in neither μ nor σ.

    Reference: Huang et al. 2024, https://arxiv.org/abs/2403.17031, details 15 and 19.
    """
    exact = [np.asarray(each, np.float64) for each in values]
    tokens = np.concatenate(exact) if exact else np.zeros(0)
    tokens = tokens[~np.isnan(tokens)]
    mean = tokens.mean() if len(tokens) else 0.0
    variance = np.square(tokens - mean).sum() / max(len(tokens) - 1, 1)
    shift = 0.0 if shift_mean else mean
    return [(each - mean) / np.sqrt(variance + _OF_VARIANCE) + shift for each in exact]


def has_signal(rewards: Float[np.ndarray, "groups samples"]) -> Bool[np.ndarray, " groups"]:
    """Whether each group's rewards differ by more than rounding, so that the policy can learn from
    them. NaN counts as no reward."""
    rewards = np.asarray(rewards, np.float64)
    is_missing = np.isnan(rewards)
    lowest = np.where(is_missing, np.inf, rewards).min(axis=1)
    highest = np.where(is_missing, -np.inf, rewards).max(axis=1)
    return highest - lowest > ROUNDING * np.where(is_missing, 0.0, np.abs(rewards)).max(axis=1)


def group_advantages(
    rewards: Float[np.ndarray, "groups samples"],
    scale: Scale = "group",
    *,
    baseline: Baseline = "group",
    lengths: Int[np.ndarray, "groups samples"] | None = None,
) -> Float[np.ndarray, "groups samples"]:
    """Returns each response's advantage A over a baseline b, computed from its prompt's responses.
    Advantages are float32 in the shape of `rewards`, NaN where there is no reward.

        A = r - b                     scale = "none" (Dr. GRPO)
        A = (r - b) / (σ + ε)         σ of the group's rewards: "group" (GRPO); of all: "batch"

    The standard deviation has the divisor n - 1, as in common implementations; the paper does not
    name its divisor. A group of one response, or of rewards equal up to rounding, gives exactly 0
    with every baseline but "none".

    Args:
      rewards: one row for each prompt, one column for each of its responses. A response with NaN
        has no reward, and counts in no mean or deviation.
      lengths: number of tokens of each response; only "length_weighted" needs them.

    >>> group_advantages(np.array([[1.0, 0.0, np.nan], [0.1, 0.1, 0.1]]), scale="none").tolist()
    [[0.5, -0.5, nan], [0.0, 0.0, 0.0]]

    Reference: Shao et al. 2024, https://arxiv.org/abs/2402.03300, section 4.1.2;
    Liu et al. 2025, https://arxiv.org/abs/2503.20783 (no scaling).
    """
    rewards = np.asarray(rewards, np.float64)
    is_scored = ~np.isnan(rewards)
    known = np.where(is_scored, rewards, 0.0)
    # The rounded mean of equal numbers can differ from them, so equality is tested, not computed.
    is_compared = is_scored & (has_signal(rewards)[:, None] | (baseline == "none"))
    advantages = np.where(is_compared, known - _baseline(known, is_scored, baseline, lengths), 0.0)
    scaled = advantages / _divisor(known, is_scored, scale)
    return np.where(is_scored, scaled, np.nan).astype(np.float32)


def _baseline(
    known: np.ndarray, is_scored: np.ndarray, baseline: Baseline, lengths: np.ndarray | None
) -> np.ndarray:
    """Returns the baseline b of each response. `known` has the rewards r, or 0 for no reward.

        b = mean(r)                               "group" (GRPO)
        b = mean of the others' r                 "leave_one_out" (RLOO)
        b = Σ length * r / Σ length               "length_weighted" (OPO)
        b = 0                                     "none"

    Reference: Ahmadian et al. 2024, https://arxiv.org/abs/2402.14740, section 2.2 (leave one out);
    Hao et al. 2025, https://arxiv.org/abs/2505.23585 (length-weighted).
    """
    count = is_scored.sum(axis=1, keepdims=True)
    total = known.sum(axis=1, keepdims=True)
    match baseline:
        case "group":
            return total / np.maximum(count, 1)
        case "leave_one_out":
            return (total - known) / np.maximum(count - 1, 1)
        case "length_weighted":
            assert lengths is not None
            weight = np.where(is_scored, np.asarray(lengths, np.float64), 0.0)
            weighted = (weight * known).sum(axis=1, keepdims=True)
            return weighted / np.maximum(weight.sum(axis=1, keepdims=True), 1.0)
        case "none":
            return np.zeros_like(known)


def _divisor(known: np.ndarray, is_scored: np.ndarray, scale: Scale) -> np.ndarray | float:
    """Returns ε + the sample standard deviation of the scored rewards; 1 if scale is "none"."""
    if scale == "none":
        return 1.0
    axis = 1 if scale == "group" else None
    count = is_scored.sum(axis=axis, keepdims=True)
    mean = known.sum(axis=axis, keepdims=True) / np.maximum(count, 1)
    squares = np.square(np.where(is_scored, known - mean, 0.0)).sum(axis=axis, keepdims=True)
    return np.sqrt(squares / np.maximum(count - 1, 1)) + _EPSILON


@dataclass(frozen=True)
class AdvantageEstimator:
    """Turns rewards into the advantage of each token.

    Args:
      whiten: whether advantages are finally scaled to mean 0, variance 1 over the batch's tokens.
      beta: β, by which the reward is reduced for each nat of KL to the reference policy.

    With a baseline, β times the KL summed over a response is first subtracted from its reward.
    Without one, a token's advantage contains the KL from that token on, as in REINFORCE++:

        A_t = r - β Σ_{s ≥ t} kl_s

    Reference: Hu et al. 2025, https://arxiv.org/abs/2501.03262 (REINFORCE++).
    """

    baseline: Baseline = "group"
    scale: Scale = "group"
    whiten: bool = False
    beta: float = 0.0

    def __call__(
        self,
        rewards: Float[np.ndarray, "groups samples"],
        lengths: Int[np.ndarray, "groups samples"],
        kl: Sequence[Float[np.ndarray, " _"]] | None = None,
    ) -> list[list[Float[np.ndarray, " _"]]]:
        """
        Args:
          rewards: reward of each response, or NaN if it has none.
          lengths: number of tokens of each response.
          kl: for each response, group by group, the KL to the reference in nats, estimated at each
            of its tokens; needed if beta > 0.

        Returns:
          The advantages of each response's tokens, group by group; NaN if it has no reward.
        """
        num_samples = rewards.shape[1]
        penalty = [np.zeros(n) for n in lengths.reshape(-1)]
        if self.beta:
            assert kl is not None
            penalty = [self.beta * np.asarray(each, np.float64) for each in kl]
        total = np.array([each.sum() for each in penalty]).reshape(rewards.shape)
        if self.baseline == "none":
            later = [np.cumsum(each[::-1])[::-1] for each in penalty]
            scored = rewards.astype(np.float64).reshape(-1)
            found = [reward - each for reward, each in zip(scored, later, strict=True)]
        else:
            relative = group_advantages(
                rewards - total, self.scale, baseline=self.baseline, lengths=lengths
            ).astype(np.float64)
            found = [
                np.full(length, advantage)
                for length, advantage in zip(lengths.reshape(-1), relative.reshape(-1), strict=True)
            ]
        if self.whiten:
            found = whitened(found)
        found = [each.astype(np.float32) for each in found]
        return [found[i : i + num_samples] for i in range(0, len(found), num_samples)]


def overlong_penalty(
    lengths: Int[np.ndarray, "*shape"], cap: int, *, share: float, penalty: float
) -> Float[np.ndarray, "*shape"]:
    """Returns the penalty to subtract from rewards: DAPO's soft overlong punishment.

        0 up to cap - buffer tokens, then linear up to `penalty` at cap;   buffer = share * cap

    Args:
      lengths: number of tokens of each response, at most `cap`.
      cap: largest number of tokens that a response may have.

    Reference: Yu et al. 2025, https://arxiv.org/abs/2503.14476, eq. 13.
    """
    buffer = share * cap
    if not buffer:
        return np.zeros(np.shape(lengths))
    return penalty * np.clip((lengths - (cap - buffer)) / buffer, 0.0, 1.0)


def gdpo_advantages(
    scores: Float[np.ndarray, "functions groups samples"], weights: Sequence[float]
) -> Float[np.ndarray, "groups samples"]:
    """Returns each response's advantage over its siblings, after each function's scores are
    normalised separately. Advantages are float32, NaN for a response without any score.

        A_k = (r_k - mean of the group) / (σ_k of the group + 1e-6)     for each function k
        S   = Σ_k w_k A_k
        A   = (S - mean of the batch) / sqrt(σ² of the batch + 1e-8)

    Normalising the sum instead (GRPO) lets rewards of a large spread dominate whatever the weights,
    and makes different combinations of rewards equal. σ is the sample's (n - 1). A function that
    gives all responses of a group the same score adds exactly 0 in this group.

    Args:
      scores: scores by each reward function; NaN if the function does not apply to the response,
        which then counts in none of the function's means.
      weights: w, one for each function. A function of weight 0 is left out.

    Reference: Liu et al. 2026, https://arxiv.org/abs/2601.05242, section 3 (GDPO).
    """
    counted = [k for k, weight in enumerate(weights) if weight]
    relative = [group_advantages(scores[k]).astype(np.float64) for k in counted]
    total = sum(weights[k] * np.nan_to_num(each) for k, each in zip(counted, relative, strict=True))
    is_scored = np.any([~np.isnan(each) for each in relative], axis=0)
    (found,) = whitened([np.where(is_scored, total, np.nan).reshape(-1)])
    return found.reshape(is_scored.shape).astype(np.float32)
