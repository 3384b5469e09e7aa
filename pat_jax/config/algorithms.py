"""Algorithms by name: the options that each name sets.

Each option can still be set by itself. Options that a name leaves out are as in GRPO.
"""

from collections.abc import Mapping
from typing import Any, Literal

Name = Literal[
    "grpo",
    "dr_grpo",
    "dapo",
    "gspo",
    "cispo",
    "distill",
    "rloo",
    "reinforce_pp",
    "reinforce_pp_baseline",
    "opo",
    "gdpo",
    "ppo",
]
Parts = Mapping[str, Any]  # values of the fields of `AlgorithmConfig`

# As TRL and verl have it by default: tokens averaged over the mini-batch. The paper averages over each
# response first (`loss_aggregation: sequence`). https://arxiv.org/abs/2402.03300
_GRPO: Parts = {
    "baseline": "group",
    "scale_rewards": "group",
    "multi_objective_aggregation": "sum_then_normalize",
    "whiten_advantages": False,
    "ratio": "token",
    "surrogate": "ppo",
    "epsilon": 0.2,
    "epsilon_high": 0.2,
    "delta": 3.0,
    "loss_aggregation": "token",
    "kl_in": "loss",
    "kl_estimator": "k3",
    "use_bias_correction_kl": True,
    "entropy_coef": 0.0,
    "reward_coef": 1.0,
    "distill_coef": 0.0,
    "dynamic_sampling": 0,
    "overlong_buffer": 0.0,
}

_PARTS: Mapping[str, Parts] = {
    "grpo": {},
    # Neither the deviation nor the length of a response divides. https://arxiv.org/abs/2503.20783
    "dr_grpo": {"scale_rewards": "none", "loss_aggregation": "constant"},
    # Clip-higher, token average, dynamic sampling, soft overlong punishment: a buffer of 4,096 of 20,480
    # tokens. https://arxiv.org/abs/2503.14476
    "dapo": {"epsilon_high": 0.28, "dynamic_sampling": 10, "overlong_buffer": 0.2},
    # One ratio for each sequence, and its narrow clips. https://arxiv.org/abs/2507.18071
    "gspo": {
        "ratio": "sequence",
        "epsilon": 3e-4,
        "epsilon_high": 4e-4,
        "delta": 0.0,
        "loss_aggregation": "sequence",
    },
    # The weight of a token is clipped, not its gradient: from above alone, at 5 as in ScaleRL
    # (https://arxiv.org/abs/2510.13786). https://arxiv.org/abs/2506.13585
    "cispo": {"surrogate": "cispo", "epsilon": 1.0, "epsilon_high": 4.0, "delta": 0.0},
    # Advantages are a teacher's log-ratios alone, as in Tinker; rewards only measure.
    # https://thinkingmachines.ai/blog/on-policy-distillation
    "distill": {
        "baseline": "none",
        "scale_rewards": "none",
        "reward_coef": 0.0,
        "distill_coef": 1.0,
    },
    # The mean of the others is the baseline; KL in the reward. https://arxiv.org/abs/2402.14740
    "rloo": {
        "baseline": "leave_one_out",
        "scale_rewards": "none",
        "ratio": "trajectory",
        "delta": 0.0,
        "loss_aggregation": "sequence",
        "kl_in": "reward",
        "kl_estimator": "k1",
    },
    # No groups: advantages are whitened over the tokens of the batch; KL at each token of the reward.
    # https://arxiv.org/abs/2501.03262
    "reinforce_pp": {
        "baseline": "none",
        "scale_rewards": "none",
        "whiten_advantages": True,
        "kl_in": "reward",
        "kl_estimator": "k1",
    },
    # Of the same paper, for several responses to a prompt.
    "reinforce_pp_baseline": {
        "scale_rewards": "none",
        "whiten_advantages": True,
        "kl_estimator": "k2",  # which has the KL's own gradient without the ratio
        "use_bias_correction_kl": False,
    },
    # The baseline of least variance, where a longer response has the larger gradient; meant for one
    # update a batch. https://arxiv.org/abs/2505.23585
    "opo": {"baseline": "length_weighted", "scale_rewards": "none"},
    # Each of several rewards on its own scale. https://arxiv.org/abs/2601.05242
    "gdpo": {"multi_objective_aggregation": "normalize_then_sum"},
    # A critic predicts the reward to come from each token; advantages are whitened, KL is in the reward, as
    # in TRL, OpenRLHF and verl. One pass over each batch, in mini-batches, is OpenRLHF's and verl's: TRL's
    # four passes drift further from the rollout. https://arxiv.org/abs/1707.06347, https://arxiv.org/abs/2203.02155
    "ppo": {
        "baseline": "critic",
        "scale_rewards": "none",
        "whiten_advantages": True,
        "kl_in": "reward",
        "kl_estimator": "k1",
    },
}

ALGORITHMS: Mapping[str, Parts] = {name: {**_GRPO, **parts} for name, parts in _PARTS.items()}
