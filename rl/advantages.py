"""How much better a response is than its siblings. Knows rewards, not tokens; runs on the host."""

from typing import Literal

import numpy as np
from jaxtyping import Bool, Float

# Of the largest reward: a few units in the last place of float32, in which rewards are kept.
ROUNDING = 4 * float(np.finfo(np.float32).eps)


def has_signal(rewards: Float[np.ndarray, "groups samples"]) -> Bool[np.ndarray, " groups"]:
    """Whether a group's rewards differ by more than rounding: else nothing is learned from it.

    NaN is no reward.
    """
    rewards = np.asarray(rewards, np.float64)
    is_missing = np.isnan(rewards)
    lowest = np.where(is_missing, np.inf, rewards).min(axis=1)
    highest = np.where(is_missing, -np.inf, rewards).max(axis=1)
    return highest - lowest > ROUNDING * np.where(is_missing, 0.0, np.abs(rewards)).max(axis=1)


def group_advantages(
    rewards: Float[np.ndarray, "groups samples"],
    scale: Literal["group", "none"] = "group",
    eps: float = 1e-6,
) -> Float[np.ndarray, "groups samples"]:
    """The group-relative advantage of GRPO: every response against the others of its prompt.

        A = r - mean(r)                      scale = "none" (Dr. GRPO)
        A = (r - mean(r)) / (std(r) + eps)   scale = "group"

    The paper does not say which standard deviation; here it is the sample's (n - 1), as in the
    common implementations. A group of rewards equal up to rounding, or of one, gives exactly zero.

    Args:
      rewards: one row for each prompt, one column for each of its responses; NaN for a response
        that has none, which then is in no mean and no deviation.
      scale: divide by the group's standard deviation, or not.
      eps: keeps nearly equal rewards from being blown up; in units of the reward.

    Returns:
      float32, the shape of `rewards`; NaN where there is no reward.

    >>> group_advantages(np.array([[1.0, 0.0, np.nan], [0.1, 0.1, 0.1]]), scale="none").tolist()
    [[0.5, -0.5, nan], [0.0, 0.0, 0.0]]

    Reference: Shao et al. 2024, https://arxiv.org/abs/2402.03300, section 4.1.2;
    Liu et al. 2025, https://arxiv.org/abs/2503.20783 (no scaling).
    """
    rewards = np.asarray(rewards, np.float64)
    _check(rewards)
    is_scored = ~np.isnan(rewards)
    num_scored = is_scored.sum(axis=1, keepdims=True)
    known = np.where(is_scored, rewards, 0.0)
    mean = known.sum(axis=1, keepdims=True) / np.maximum(num_scored, 1)
    # The rounded mean of equal numbers can differ from them, so equality is tested, not computed.
    is_centred = is_scored & has_signal(rewards)[:, None]
    centred = np.where(is_centred, known - mean, 0.0)
    match scale:
        case "none":
            advantages = centred
        case "group":
            variance = np.square(centred).sum(axis=1, keepdims=True) / np.maximum(num_scored - 1, 1)
            advantages = centred / np.where(is_centred, np.sqrt(variance) + eps, 1.0)
        case _:
            raise ValueError(f"scale is {scale!r}; expected 'group' or 'none'.")
    return np.where(is_scored, advantages, np.nan).astype(np.float32)


def _check(rewards: np.ndarray) -> None:
    if rewards.ndim != 2 or rewards.shape[1] == 0:
        raise ValueError(
            f"rewards must have shape (groups, samples) with at least one sample; got "
            f"{rewards.shape}."
        )
    bad = np.argwhere(np.isinf(rewards))
    if len(bad):
        group, sample = bad[0]
        raise ValueError(
            f"the reward of sample {sample} of group {group} is {rewards[group, sample]}; expected "
            f"a finite number. Usual cause: a reward function that divides by zero."
        )
