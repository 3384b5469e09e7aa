"""The losses of pairs: of two responses to a prompt, the chosen one gets the higher reward.

Reward models and policies (DPO) learn from them. Knows values at the ends of responses, and
log-probabilities of responses. Does not know how pairs are packed, except that a row holds both
responses of a pair one after the other.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jaxtyping import Array

from pat_jax.rl.algorithm.losses import (
    ENTROPY,
    LOGPROBS,
    PREDICTED,
    VALUES,
    Columns,
    Loss,
    PerToken,
    Reduction,
    Responses,
)


@dataclass(frozen=True)
class PairLoss(Loss):
    """The negative log-likelihood that the chosen response wins, in Bradley and Terry's model.

        loss = Σ weights * (-log σ(r_c - r_r - margin) + c (r_c + r_r)²)

    r_c and r_r are the values at the last token of the chosen and of the rejected response. Weights
    are positive at these two tokens and 0 at all others. Both tokens have the loss of their pair,
    so weights 1 / (2 * pairs) average over pairs.

    A row holds whole pairs: its responses 1 and 2 are a pair, then 3 and 4, the chosen one first.
    Weights, responses and columns are at the last token itself, whose hidden state has seen the
    whole response. In a policy's loss they are at the position before the token.

    Column, read only if `has_margin`:
      margin: by how much the chosen reward should be higher; the same number at both tokens.

    Reference: Ouyang et al. 2022, https://arxiv.org/abs/2203.02155, eq. 1;
    Touvron et al. 2023, https://arxiv.org/abs/2307.09288, eq. 2 (margin);
    Eisenstein et al. 2023, https://arxiv.org/abs/2312.09244, section 2 (centring), as in TRL's
    RewardTrainer.
    """

    center_coef: float = 0.0  # c; 0.01 keeps the mean reward near 0
    has_margin: bool = False

    @property
    def metrics(self) -> Mapping[str, Reduction]:
        return {
            "loss": Reduction.SUM,
            "accuracy": Reduction.MEAN,  # share of pairs with r_c > r_r; equal ones count a half
            "margin": Reduction.MEAN,  # r_c - r_r
            "chosen_reward": Reduction.MEAN,
            "rejected_reward": Reduction.MEAN,
            "reward_mean": Reduction.MEAN,  # of r_c and r_r together
        }

    @property
    def needs(self) -> tuple[str, ...]:
        return ("margin",) if self.has_margin else ()

    @property
    def predicted(self) -> tuple[str, ...]:
        return PREDICTED["scalar"]

    def values(self, predicted: Columns, columns: Columns, responses: Responses) -> Columns:
        chosen, rejected = sum_by_pair(predicted[VALUES], responses)
        apart = chosen - rejected
        wanted = columns["margin"] if self.has_margin else 0.0
        loss = jax.nn.softplus(wanted - apart)
        if self.center_coef:
            loss += self.center_coef * jnp.square(chosen + rejected)
        return {
            "loss": loss,
            "accuracy": jnp.nan_to_num(jnp.heaviside(apart, 0.5)),
            "margin": apart,
            "chosen_reward": chosen,
            "rejected_reward": rejected,
            "reward_mean": predicted[VALUES],
        }


def sum_by_pair(values: PerToken, responses: Responses) -> tuple[PerToken, PerToken]:
    """Returns at each position the sums over the chosen and over the rejected response of its pair.

    Responses 2i - 1 and 2i of a row are a pair. At positions of no response, sums have no meaning.
    """

    def of_row(values: Array, responses: Array) -> tuple[Array, Array]:
        # Row by row: rows are split over devices, and no sum crosses rows.
        totals = jax.ops.segment_sum(values, responses, len(values) + 1)
        chosen = responses - (responses + 1) % 2
        return totals[chosen], totals[chosen + 1]

    return jax.vmap(of_row)(values, responses)


@dataclass(frozen=True)
class DPOLoss(Loss):
    """The negative log-likelihood that the chosen response wins, with rewards β log(π / π_ref).

        h    = (log π(c) - log π_ref(c)) - (log π(r) - log π_ref(r))
        loss = Σ weights * (-(1 - ε) log σ(β h) - ε log σ(-β h))

    c is the chosen response and r the rejected one; log-probabilities are sums over their tokens.
    Every token of both has the loss of its pair. So the weights of `token_weights(…, "sequence")`,
    1 / (tokens of the token's response * responses), average over pairs.

    A row holds whole pairs: its responses 1 and 2 are a pair, then 3 and 4, the chosen one first.

    Column:
      reference_logprobs: log π_ref of each token in nats.

    Reference: Rafailov et al. 2023, https://arxiv.org/abs/2305.18290, eq. 7;
    Mitchell 2023, https://ericmitchell.ai/cdpo.pdf (label smoothing, ε).
    """

    beta: float = 0.1  # β
    label_smoothing: float = 0.0  # ε, the assumed share of pairs with the wrong one chosen

    @property
    def metrics(self) -> Mapping[str, Reduction]:
        return {
            "loss": Reduction.SUM,
            "accuracy": Reduction.MEAN,  # share of pairs with chosen reward > rejected reward; equal: a half
            "margin": Reduction.MEAN,  # chosen reward - rejected reward
            "chosen_reward": Reduction.MEAN,  # β (log π(c) - log π_ref(c)), nats
            "rejected_reward": Reduction.MEAN,
            "chosen_logprob": Reduction.MEAN,  # log π(c), nats of the whole response
            "rejected_logprob": Reduction.MEAN,
            "entropy": Reduction.MEAN,  # of the policy's next-token distribution, nats
        }

    @property
    def needs(self) -> tuple[str, ...]:
        return ("reference_logprobs",)

    def values(self, predicted: Columns, columns: Columns, responses: Responses) -> Columns:
        logprobs = predicted[LOGPROBS]
        # Subtract before summing: sums over many tokens would lose the digits of a difference.
        ratios = sum_by_pair(self.beta * (logprobs - columns["reference_logprobs"]), responses)
        chosen, rejected = ratios
        apart = chosen - rejected
        loss = (1 - self.label_smoothing) * jax.nn.softplus(-apart)
        loss += self.label_smoothing * jax.nn.softplus(apart)
        chosen_logprob, rejected_logprob = sum_by_pair(logprobs, responses)
        return {
            "loss": loss,
            "accuracy": jnp.nan_to_num(jnp.heaviside(apart, 0.5)),
            "margin": apart,
            "chosen_reward": chosen,
            "rejected_reward": rejected,
            "chosen_logprob": chosen_logprob,
            "rejected_logprob": rejected_logprob,
            "entropy": predicted[ENTROPY],
        }
