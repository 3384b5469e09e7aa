"""Computes advantages and returns from rewards and a critic's values. Runs on the host.

Each argument has one array for each response, as `TrainBatch.by_response` returns them.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
from jaxtyping import Float

from pat_jax.rl.algorithm.advantages import whitened

PerResponse = Sequence[Float[np.ndarray, " _"]]


def token_rewards(
    scores: Float[np.ndarray, " responses"], kl: PerResponse, beta: float
) -> list[Float[np.ndarray, " _"]]:
    """Returns the reward of each token: the KL penalty and, at the last token, the score. The
    arrays are float64 in the shapes of `kl`.

        r_t = -β kl_t + (score if t is the response's last token else 0)

    Args:
      scores: reward of each response. NaN means no reward; its last token's reward is NaN, too.
      kl: for each response, an estimate of KL(policy || reference) in nats at each of its tokens.
      beta: β, the penalty per nat.

    Reference: Ziegler et al. 2019, https://arxiv.org/abs/1909.08593, section 2, by token as in
    Ouyang et al. 2022, https://arxiv.org/abs/2203.02155.
    """
    rewards = [-beta * np.asarray(each, np.float64) for each in kl]
    for reward, score in zip(rewards, np.asarray(scores, np.float64), strict=True):
        reward[-1:] += score
    return rewards


def gae(
    rewards: PerResponse, values: PerResponse, gamma: float, lam: float
) -> tuple[list[Float[np.ndarray, " _"]], list[Float[np.ndarray, " _"]]]:
    """Returns generalized advantage estimates and the returns that the critic learns. Advantages
    are not whitened; both are float32 in the shapes of `rewards`.

        δ_t = r_t + γ V_{t+1} - V_t
        A_t = δ_t + γ λ A_{t+1}
        R_t = A_t + V_t

    V and A after the last token are 0. So truncated responses end there, too, as in verl and TRL:
    nothing is bootstrapped.

    Args:
      rewards: rewards of each token, from `token_rewards`. NaN makes all tokens before it NaN.
      values: the critic's V before each token, under the parameters of the rollout.
      gamma: γ, the discount per token.
      lam: λ, from 0 (one step, biased by the critic) to 1 (the whole response's rewards).

    >>> [each.tolist() for each in gae([np.array([0.0, 1.0])], [np.array([0.5, 0.5])], 1.0, 0.5)[0]]
    [[0.25, 0.5]]

    Reference: Schulman et al. 2015, https://arxiv.org/abs/1506.02438, eq. 11 and 16.
    """
    exact = [np.asarray(each, np.float64) for each in values]
    deltas = []
    for reward, value in zip(rewards, exact, strict=True):
        assert len(reward) == len(value)
        deltas.append(reward + gamma * np.append(value, 0.0)[1:] - value)
    advantages = [_discounted(each, gamma * lam) for each in deltas]
    returns = [a + v for a, v in zip(advantages, exact, strict=True)]
    return [each.astype(np.float32) for each in advantages], [
        each.astype(np.float32) for each in returns
    ]


def _discounted(values: Float[np.ndarray, " _"], decay: float) -> Float[np.ndarray, " _"]:
    """Returns Σ_{s ≥ t} decay^(s - t) x_s at each t."""
    sums = accumulate(values[::-1].tolist(), lambda later, x: x + decay * later)
    return np.array(list(sums), np.float64)[::-1]


@dataclass(frozen=True)
class CriticEstimator:
    """Turns the reward of each response into advantages and returns of its tokens.

    The reward of a token is -β kl; at the last token of a response, its score is added. Generalized
    advantage estimation follows (`gae`). Advantages are whitened after the returns are known.

    Args:
      gamma, lam: γ and λ of `gae`.
      beta: β, by which the reward is reduced for each nat of KL to the reference policy.
      whiten: whether advantages are scaled to mean 0 and variance 1 over the batch's tokens.
      whiten_rewards: whether token rewards are scaled to variance 1 first; their mean stays.

    Reference: Ouyang et al. 2022, https://arxiv.org/abs/2203.02155, appendix C; Huang et al. 2024,
    https://arxiv.org/abs/2403.17031, which lists details of implementations.
    """

    gamma: float = 1.0
    lam: float = 0.95
    beta: float = 0.0
    whiten: bool = True
    whiten_rewards: bool = False

    def __call__(
        self, scores: Float[np.ndarray, " responses"], kl: PerResponse, values: PerResponse
    ) -> tuple[list[Float[np.ndarray, " _"]], list[Float[np.ndarray, " _"]]]:
        """
        Args:
          scores: reward of each response, or NaN if it has none.
          kl: for each response, the KL to the reference in nats, estimated at each of its tokens.
          values: for each response, the critic's value before each of its tokens.

        Returns:
          Advantages and returns of each response's tokens, float32; NaN if it has no reward.
        """
        rewards = token_rewards(scores, kl, self.beta)
        if self.whiten_rewards:
            rewards = whitened(rewards, shift_mean=False)
        advantages, returns = gae(rewards, values, self.gamma, self.lam)
        # If the discount is 0, some tokens of a response without a reward have numbers, not NaN.
        for response in np.flatnonzero(np.isnan(scores)):
            advantages[response][:] = returns[response][:] = np.nan
        if self.whiten:
            advantages = whitened(advantages)
        return [each.astype(np.float32) for each in advantages], returns
