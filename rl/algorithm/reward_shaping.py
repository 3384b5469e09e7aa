"""Normalises, clips and penalises a batch's rewards before advantages are computed from them.

Also adapts the coefficient of the KL penalty to a target KL.

Runs on the host. Whitening of token rewards is `advantages.whitened` with `shift_mean=False`.
"""

import math
from dataclasses import dataclass, replace

import numpy as np
from jaxtyping import Bool, Float

_EPSILON = 1e-6  # in units of the reward: keeps nearly equal rewards from being blown up
_LARGEST_ERROR = 0.2  # limit of |e|: one iteration multiplies β by at most 1 ± 0.2 n / horizon


@dataclass(frozen=True)
class RewardMoments:
    """Mean and deviation of all rewards of a run so far.

    Reference: Chan et al. 1979, eq. 1.5 (combining sums of squares); TRL's `RunningMoments`.
    OpenRLHF instead stores a mean and a deviation in the reward model, measured after its training.
    """

    count: int = 0
    mean: float = 0.0
    squares: float = 0.0  # Σ (r - mean)²

    def after(self, rewards: Float[np.ndarray, "..."]) -> "RewardMoments":
        """Returns the moments with these rewards, too; NaN counts as no reward."""
        known = np.asarray(rewards, np.float64)
        known = known[~np.isnan(known)]
        if not len(known):
            return self
        count = self.count + len(known)
        mean = float(known.mean())
        apart = mean - self.mean
        squares = float(np.square(known - mean).sum()) + apart**2 * self.count * len(known) / count
        return RewardMoments(count, self.mean + apart * len(known) / count, self.squares + squares)

    @property
    def deviation(self) -> float:
        """The rewards' sample standard deviation (divisor n - 1); 0 before the second reward."""
        return math.sqrt(self.squares / max(self.count - 1, 1))

    def normalized(self, rewards: Float[np.ndarray, "*shape"]) -> Float[np.ndarray, "*shape"]:
        """Returns (r - mean) / (deviation + 1e-6), float64."""
        return (np.asarray(rewards, np.float64) - self.mean) / (self.deviation + _EPSILON)


def shaped_rewards(
    rewards: Float[np.ndarray, "*shape"],
    has_end: Bool[np.ndarray, "*shape"],
    *,
    moments: RewardMoments | None = None,
    clip: tuple[float, float] | None = None,
    missing_eos_penalty: float = 0.0,
) -> Float[np.ndarray, "*shape"]:
    """Returns the rewards after three steps, in this order: normalise, clip, subtract the penalty
    for a missing end of sequence. They are float64 in the shape of `rewards`.

    The penalty comes last: so it is in the unit of the final rewards, and no clip removes it.

    Args:
      rewards: reward of each response. NaN means no reward, and stays NaN.
      has_end: whether each response ends with an end-of-sequence token.
      moments: moments of all rewards of the run, including these; None: do not normalise.
      clip: lowest and highest reward; None: do not clip.
      missing_eos_penalty: number subtracted from the reward of a response without such an end.

    Reference: TRL's `missing_eos_penalty`; OpenRLHF's `reward_clip_range`; DeepSpeed-Chat clips to
    ±5, Yao et al. 2023, https://arxiv.org/abs/2308.01320.
    """
    shaped = np.asarray(rewards, np.float64)
    if moments is not None:
        shaped = moments.normalized(shaped)
    if clip is not None:
        lowest, highest = clip
        shaped = np.clip(shaped, lowest, highest)
    return shaped - np.where(has_end, 0.0, missing_eos_penalty)


@dataclass(frozen=True)
class KLControl:
    """The coefficient β: fixed if there is no target KL, else adapted after each iteration.

        e = clip(KL / target - 1, -0.2, 0.2)
        β ← β (1 + e n / horizon)

    So β grows while the KL to the reference is above the target, and shrinks while it is below. β
    stays positive if it begins so, since an iteration has n < 5 horizon responses.

    Reference: Ziegler et al. 2019, https://arxiv.org/abs/1909.08593, section 2.2.
    """

    beta: float  # β, units of reward per nat
    target: float | None = None  # target KL in nats; None: β is fixed
    horizon: int = 10_000  # number of responses; the larger, the slower β changes

    def after(self, kl: float, n: int) -> "KLControl":
        """Returns the control for the next iteration.

        Args:
          kl: KL(policy || reference) of this iteration in nats, averaged as the target is: over
            tokens, or over responses after summing over their tokens. NaN (no responses) changes
            nothing.
          n: number of responses of this iteration.
        """
        if self.target is None or math.isnan(kl):
            return self
        error = min(max(kl / self.target - 1, -_LARGEST_ERROR), _LARGEST_ERROR)
        return replace(self, beta=self.beta * (1 + error * n / self.horizon))
