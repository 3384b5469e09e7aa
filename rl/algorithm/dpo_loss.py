"""Direct preference optimisation: a policy learns from pairs without a reward model.

Knows log-probabilities of pairs of responses, packed as for `PairLoss`.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import jax

from pat_jax.rl.algorithm.losses import ENTROPY, LOGPROBS, Columns, Loss, Reduction, Responses
from pat_jax.rl.algorithm.pair_loss import sum_by_pair


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
            "accuracy": Reduction.MEAN,  # share of pairs with chosen reward > rejected reward
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
            "accuracy": (apart > 0).astype(apart.dtype),
            "margin": apart,
            "chosen_reward": chosen,
            "rejected_reward": rejected,
            "chosen_logprob": chosen_logprob,
            "rejected_logprob": rejected_logprob,
            "entropy": predicted[ENTROPY],
        }
