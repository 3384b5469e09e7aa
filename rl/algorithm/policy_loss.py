"""The losses of policy-gradient algorithms, composed of parts that each paper chooses.

Knows log-probabilities and advantages. Does not know how advantages are computed (`advantages.py`),
nor how tokens are weighted (`batches.token_weights`).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool

from pat_jax.rl.algorithm.kl import (
    MAX_LOG_RATIO,
    Estimator,
    estimate_kl,
    kl_weight,
    log_ratio,
)
from pat_jax.rl.algorithm.losses import (
    ENTROPY,
    LOGPROBS,
    PREDICTED,
    TEACHER_KL,
    Columns,
    Loss,
    PerToken,
    Reduction,
    Responses,
)

Ratio = Literal["token", "sequence", "trajectory"]
Surrogate = Literal["ppo", "cispo"]
Correction = Literal["none", "token_truncate", "token_mask", "sequence_truncate", "sequence_mask"]


@dataclass(frozen=True)
class PolicyLoss(Loss):
    """A surrogate of the policy gradient, with a penalty towards the reference policy.

        loss = Σ weights * (β * kl - c * gain - entropy_coef * entropy + distill_coef * teacher_kl)

    With `corrects_kl`, kl is the estimate times ρ, so that its gradient also is that of the KL.

    ρ is the probability ratio of the policy to the old policy, the one before this batch's first
    update, with l_t = logprobs - old_logprobs:

        ρ_t = exp(l_t)                                     ratio = "token" (PPO, GRPO)
        ρ_t = exp(mean of l over the tokens of its response)       "sequence" (GSPO)
        ρ_t = exp(sum of l over the tokens of its response)        "trajectory" (RLOO)

    The gain uses clip(ρ) = min(max(ρ, 1 - ε), 1 + ε_high):

        gain = min(ρ A, clip(ρ) A), at least δ A where A < 0       surrogate = "ppo"
        gain = stop_gradient(clip(ρ)) * A * logprobs                           "cispo"

    c corrects for sampling from another distribution than the old policy, with
    w = exp(old_logprobs - sampled_logprobs) at each token, or its product over a response:

        c = min(w, cap)                                    correction = "…_truncate" (TIS)
        c = w if w ≤ cap else 0                                         "…_mask" (MIS)

    With weights 1 / (all tokens) this averages over tokens (DAPO); with
    1 / (tokens of its sequence * sequences), over each sequence first (GRPO); with
    1 / (longest response * sequences), by a constant (Dr. GRPO): see `batches.token_weights`.

    Exponents are clamped to ±20, which keeps loss and gradient finite: exp of an unbounded
    log-ratio overflows, and its gradient is NaN even where the clip applies. Beyond the clamp the
    gradient is 0.

    Columns, log-probabilities in nats:
      advantages: A.
      behavior_logprobs: under the rollout's policy, before top-k and top-p; used only in metrics.
      sampled_logprobs: under the sampled distribution, after top-k and top-p; read only with a
        correction.
      old_logprobs: under the policy before this batch's first update; not read if `is_on_policy`.
      reference_logprobs: under the frozen reference policy; read only if β > 0.

    Reference: Shao et al. 2024, https://arxiv.org/abs/2402.03300, eq. 3 and 4 (GRPO);
    Yu et al. 2025, https://arxiv.org/abs/2503.14476, eq. 8 (DAPO: clip-higher, token average);
    Zheng et al. 2025, https://arxiv.org/abs/2507.18071, eq. 5 to 7 (GSPO);
    MiniMax 2025, https://arxiv.org/abs/2506.13585, eq. 4 and 5 (CISPO);
    Ahmadian et al. 2024, https://arxiv.org/abs/2402.14740 (RLOO);
    Ye et al. 2020, https://arxiv.org/abs/1912.09729, eq. 5 (dual clip, δ);
    DeepSeek-AI 2025, https://arxiv.org/abs/2512.02556, section 3.1 (`corrects_kl`);
    Yao et al. 2025, https://fengyao.notion.site/off-policy-rl (truncated importance sampling).
    """

    ratio: Ratio = "token"
    surrogate: Surrogate = "ppo"
    epsilon: float = 0.2  # ε, the lower clip
    epsilon_high: float = 0.2  # ε_high, the upper clip (above ε: clip-higher)
    # δ, the largest ratio that counts where A < 0. It bounds the gradient of a token that has grown
    # likelier but should not. 0: there is no such bound, as in the GRPO paper.
    delta: float = 3.0
    beta: float = 0.0  # β
    kl_estimator: Estimator = "k3"
    corrects_kl: bool = False
    entropy_coef: float = 0.0
    # Weight of the KL to a teacher over its `top_k` likeliest tokens; with top_k 0, no such term.
    distill_coef: float = 0.0
    top_k: int = 0
    correction: Correction = "none"
    correction_cap: float = 2.0
    # Whether every batch is used for one update. The old policy is then the policy itself: the
    # ratio is 1, and no clip applies.
    is_on_policy: bool = False

    @property
    def metrics(self) -> Mapping[str, Reduction]:
        shared = {
            "loss": Reduction.SUM,
            "clip_fraction": Reduction.MEAN,  # share of tokens whose policy gradient is clipped
            "clip_fraction_low": Reduction.MEAN,  # … with a ratio under 1 - ε
            "clip_fraction_high": Reduction.MEAN,  # … with a ratio that is too high
            "ratio_mean": Reduction.MEAN,
            "ratio_min": Reduction.MIN,
            "ratio_max": Reduction.MAX,
            "approx_kl": Reduction.MEAN,  # KL(old || policy) in nats, k3 estimate
            "reference_kl": Reduction.MEAN,  # KL(policy || reference) in nats
            "entropy": Reduction.MEAN,  # of the policy's next-token distribution, nats
            "cross_entropy": Reduction.MEAN,  # -log π(token), nats
            "behavior_gap": Reduction.MEAN,  # |old - behavior| of the log-probabilities, nats
            "behavior_gap_max": Reduction.MAX,
        }
        if self.top_k:
            shared[TEACHER_KL] = Reduction.MEAN  # KL(policy || teacher) in nats, `top_k_reverse_kl`
        if self.correction == "none":
            return shared
        return shared | {
            "correction_mean": Reduction.MEAN,  # c
            "correction_max": Reduction.MAX,
            "correction_capped": Reduction.MEAN,  # share of tokens whose w is above the cap
        }

    @property
    def needs(self) -> tuple[str, ...]:
        old = () if self.is_on_policy else ("old_logprobs",)
        reference = ("reference_logprobs",) if self.beta else ()
        sampled = () if self.correction == "none" else ("sampled_logprobs",)
        return ("advantages", "behavior_logprobs", *sampled, *old, *reference)

    @property
    def predicted(self) -> tuple[str, ...]:
        return (*PREDICTED["vocab"], *((TEACHER_KL,) if self.top_k else ()))

    @property
    def teacher_top_k(self) -> int:
        return self.top_k

    @property
    def has_entropy_gradient(self) -> bool:
        return self.entropy_coef != 0

    def values(self, predicted: Columns, columns: Columns, responses: Responses) -> Columns:
        logprobs, entropy = predicted[LOGPROBS], predicted[ENTROPY]
        old = jax.lax.stop_gradient(logprobs) if self.is_on_policy else columns["old_logprobs"]
        advantage = columns["advantages"]
        ratio = jnp.exp(self._log_ratio(logprobs, old, responses))
        gain, is_clipped = self._gain(ratio, advantage, logprobs)
        reference_kl = self._reference_kl(ratio, logprobs, columns)
        gap = jnp.abs(old - columns["behavior_logprobs"])
        found = {
            "clip_fraction": is_clipped.astype(ratio.dtype),
            "clip_fraction_low": (is_clipped & (ratio < 1.0)).astype(ratio.dtype),
            "clip_fraction_high": (is_clipped & (ratio > 1.0)).astype(ratio.dtype),
            "ratio_mean": ratio,
            "ratio_min": ratio,
            "ratio_max": ratio,
            "approx_kl": estimate_kl(old, logprobs),
            "reference_kl": reference_kl,
            "entropy": entropy,
            "cross_entropy": -logprobs,
            "behavior_gap": gap,
            "behavior_gap_max": gap,
        }
        if self.correction != "none":
            corrected = self._correction(old, columns["sampled_logprobs"], responses)
            found |= corrected
            gain = corrected["correction_mean"] * gain
        loss = self.beta * reference_kl - gain - self.entropy_coef * entropy
        if self.top_k:
            found[TEACHER_KL] = predicted[TEACHER_KL]
            loss += self.distill_coef * predicted[TEACHER_KL]
        return found | {"loss": loss}

    def _gain(
        self, ratio: PerToken, advantage: PerToken, logprobs: PerToken
    ) -> tuple[PerToken, Bool[Array, "rows length"]]:
        """Returns the clipped objective of each token, and whether its gradient is clipped."""
        clipped = jnp.clip(ratio, 1.0 - self.epsilon, 1.0 + self.epsilon_high)
        if self.surrogate == "cispo":
            return jax.lax.stop_gradient(clipped) * advantage * logprobs, clipped != ratio
        gain = jnp.minimum(ratio * advantage, clipped * advantage)
        if self.delta:
            gain = jnp.where(advantage < 0, jnp.maximum(gain, self.delta * advantage), gain)
        return gain, gain != ratio * advantage

    def _reference_kl(self, ratio: PerToken, logprobs: PerToken, columns: Columns) -> PerToken:
        if not self.beta:
            return jnp.zeros_like(logprobs)
        estimate = estimate_kl(logprobs, columns["reference_logprobs"], self.kl_estimator)
        return estimate * kl_weight(ratio, self.kl_estimator) if self.corrects_kl else estimate

    def _log_ratio(self, logprobs: PerToken, old: PerToken, responses: Responses) -> PerToken:
        if self.ratio == "token":
            return log_ratio(logprobs, old)
        total = sum_by_response(logprobs - old, responses)
        if self.ratio == "sequence":
            ones = jnp.ones_like(logprobs)
            total = total / sum_by_response(ones, responses)
        return jnp.clip(total, -MAX_LOG_RATIO, MAX_LOG_RATIO)

    def _correction(self, old: PerToken, sampled: PerToken, responses: Responses) -> Columns:
        """Returns c as `correction_mean`, and the other metrics of the correction."""
        level, how = self.correction.split("_")
        log_weight = old - sampled
        if level == "sequence":
            log_weight = sum_by_response(log_weight, responses)
        weight = jnp.exp(jnp.clip(log_weight, -MAX_LOG_RATIO, MAX_LOG_RATIO))
        is_capped = weight > self.correction_cap
        kept = self.correction_cap if how == "truncate" else 0.0
        weight = jax.lax.stop_gradient(jnp.where(is_capped, kept, weight))
        return {
            "correction_mean": weight,
            "correction_max": weight,
            "correction_capped": is_capped.astype(weight.dtype),
        }


def sum_by_response(values: PerToken, responses: Responses) -> PerToken:
    """Returns at each position the sum of `values` over its response."""

    def of_row(values: Array, responses: Array) -> Array:
        # Row by row: rows are split over devices, and no sum crosses rows.
        return jax.ops.segment_sum(values, responses, len(values))[responses]

    return jax.vmap(of_row)(values, responses)
