"""Computes advantages and returns from rewards and a critic's values. Runs on the host."""

from dataclasses import dataclass

import numpy as np
from jaxtyping import Float

from pat_jax.rl.algorithm.gae import PerResponse, gae, token_rewards
from pat_jax.rl.algorithm.whitening import whitened


@dataclass(frozen=True)
class CriticEstimator:
    """Turns the reward of each response into advantages and returns of its tokens.

    The reward of a token is -β kl; at the last token of a response, its score is added. Generalized
    advantage estimation follows (`gae.gae`). Advantages are whitened after the returns are known.

    Args:
      gamma, lam: γ and λ of `gae.gae`.
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
