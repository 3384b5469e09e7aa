"""How much better a response is than its siblings. Knows rewards, not tokens; runs on the host."""

from typing import Literal

import numpy as np
from jaxtyping import Float


def group_advantages(
    rewards: Float[np.ndarray, "groups samples"],
    scale: Literal["group", "none"] = "group",
    eps: float = 1e-6,
) -> Float[np.ndarray, "groups samples"]:
    """The group-relative advantage of GRPO: every response against the others of its prompt.

        A = r - mean(r)                      scale = "none" (Dr. GRPO)
        A = (r - mean(r)) / (std(r) + eps)   scale = "group"

    The paper does not say which standard deviation; here it is the sample's (n - 1), as in the
    common implementations. A group of equal rewards, or of one response, gives exactly zero.

    Args:
      rewards: one row for each prompt, one column for each of its responses.
      scale: divide by the group's standard deviation, or not.
      eps: keeps nearly equal rewards from being blown up; in units of the reward.

    Returns:
      float32, the shape of `rewards`.

    >>> group_advantages(np.array([[1.0, 0.0], [0.1, 0.1]]), scale="none").tolist()
    [[0.5, -0.5], [0.0, 0.0]]

    Reference: Shao et al. 2024, https://arxiv.org/abs/2402.03300, section 4.1.2;
    Liu et al. 2025, https://arxiv.org/abs/2503.20783 (no scaling).
    """
    rewards = np.asarray(rewards, np.float64)
    _check(rewards)
    # The rounded mean of equal numbers can differ from them, so equality is tested, not computed.
    is_equal = np.ptp(rewards, axis=1, keepdims=True) == 0
    centred = np.where(is_equal, 0.0, rewards - rewards.mean(axis=1, keepdims=True))
    match scale:
        case "none":
            return centred.astype(np.float32)
        case "group":
            num_samples = rewards.shape[1]
            variance = np.square(centred).sum(axis=1, keepdims=True) / max(num_samples - 1, 1)
            spread = np.where(is_equal, 1.0, np.sqrt(variance) + eps)
            return (centred / spread).astype(np.float32)
        case _:
            raise ValueError(f"scale is {scale!r}; expected 'group' or 'none'.")


def _check(rewards: np.ndarray) -> None:
    if rewards.ndim != 2 or rewards.shape[1] == 0:
        raise ValueError(
            f"rewards must have shape (groups, samples) with at least one sample; got "
            f"{rewards.shape}."
        )
    bad = np.argwhere(~np.isfinite(rewards))
    if len(bad):
        group, sample = bad[0]
        raise ValueError(
            f"the reward of sample {sample} of group {group} is {rewards[group, sample]}; expected "
            f"a finite number. Usual cause: a reward function that divides by zero."
        )
