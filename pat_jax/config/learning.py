"""Options of learning: the algorithm, and the supervised stage before it."""

from dataclasses import dataclass, field
from typing import Literal

from pat_jax.common.options.declared import SHORT_FORM, Options, auto, option, stands_for
from pat_jax.common.rules import (
    COUNT,
    FRACTION_OR_ZERO,
    RESPONSES,
    STEPS,
    Rule,
    count,
    not_negative,
    positive,
    require,
)
from pat_jax.config.algorithms import ALGORITHMS, Name
from pat_jax.config.rollout import RolloutConfig

UP_TO_ONE: Rule = (lambda x: 0 <= x <= 1, "a number from 0 to 1")
# Options that have an effect only with a critic.
OF_CRITICS = ("gamma", "lam", "value_clip", "whiten_rewards")
DELTA: Rule = (lambda x: x == 0 or 1 < x <= 1000, "0 (off) or a number above 1, at most 1000")
LOWER_CLIP: Rule = (lambda x: 0 < x <= 1, "a number above 0 and up to 1")
DEMONSTRATIONS = 64  # most in a supervised step, which is at most one micro-batch
_UNSCALED = {"scale_rewards": "none"}  # nothing is compared in groups, or it is scaled already
CAP: Rule = (lambda x: 1 <= x <= 1000, "a number from 1 to 1,000")


@dataclass(frozen=True)
class AdvantageOptions(Options):
    """How rewards become advantages and returns."""

    SECTION = "algorithm."

    multi_objective_aggregation: Literal["sum_then_normalize", "normalize_then_sum"] = (
        "sum_then_normalize"
    )
    """How several rewards become an advantage. sum_then_normalize compares their weighted sum
    within a group. normalize_then_sum compares and scales each reward within its group, and then
    scales the weighted sum of the results over the iteration (GDPO)."""
    gamma: float = option(1.0, UP_TO_ONE)
    """Discount factor per token for later rewards, with a critic."""
    lam: float = option(0.95, UP_TO_ONE)
    """Lambda of generalized advantage estimation (GAE), with a critic. 0 uses the critic's value of
    the next token, 1 only the rewards up to the end of the response."""
    value_clip: float = option(0.2, not_negative(10**6))
    """Clip range of the critic's values, in units of the reward: once an update has moved a value
    by so much, the critic's loss moves it no further. 0 turns it off."""
    whiten_rewards: bool = False
    """With a critic, divide the rewards of tokens, the KL penalty included, by their standard
    deviation over the iteration (TRL)."""
    kl_target: float = option(0.0, not_negative(1000))
    """Target of the KL to the reference policy, in nats, as a mean over tokens. Each iteration
    adapts beta to reach it (Ziegler 2019), with --algorithm.kl_in reward. 0 keeps beta fixed."""
    kl_horizon: int = option(10_000, COUNT)
    """Number of responses over which kl_target changes beta by at most about a fifth. A larger
    number adapts beta more slowly."""
    reward_clip: float = option(0.0, not_negative(10**6))
    """Clip rewards to ± this limit, after normalize_reward; 0 sets no limit."""
    normalize_reward: bool = False
    """Normalize rewards by the mean and standard deviation of all rewards of the run so far."""
    missing_eos_penalty: float = option(0.0, not_negative(10**6))
    """Number subtracted from the reward of a response that is cut at max_completion_length."""


@dataclass(frozen=True)
class AlgorithmConfig(AdvantageOptions):
    """Policy-gradient algorithms by name, and their parts (docs/algorithms.md)."""

    name: Name = field(default="grpo", metadata=stands_for(ALGORITHMS) | SHORT_FORM)
    """Name of the algorithm. It sets the defaults of the options below; each can still be set."""
    loss: str = ""
    """A loss of your own: `path/to/file.py:Class` or `module:Class` (docs/algorithms.md). If
    it is empty, the options below describe the loss."""
    baseline: Literal["group", "leave_one_out", "length_weighted", "none", "critic"] = field(
        default="group", metadata=stands_for({"none": _UNSCALED, "critic": _UNSCALED})
    )
    """What is subtracted from a reward. group: the mean of its group (GRPO). leave_one_out: the
    mean of the other rewards of its group (RLOO). length_weighted: the group's mean, weighted by
    response lengths (OPO). none: nothing. critic: the value that a critic predicts at each token
    (PPO). none and critic also set scale_rewards to none."""
    scale_rewards: Literal["group", "batch", "none"] = "group"
    """Divide reward minus baseline by a standard deviation. group: of the group's rewards (GRPO).
    batch: of all rewards of the iteration. none: do not divide (Dr. GRPO, together with
    loss_aggregation constant)."""
    whiten_advantages: bool = field(default=False, metadata=stands_for({"true": _UNSCALED}))
    """Subtract from advantages their mean over all tokens of the iteration, and divide them by
    their standard deviation (REINFORCE++). This also sets scale_rewards to none."""
    ratio: Literal["token", "sequence", "trajectory"] = "token"
    """Probability ratio to the policy before the update. token: of each token (GRPO). sequence: the
    geometric mean over the tokens of a response (GSPO). trajectory: their product (RLOO)."""
    surrogate: Literal["ppo", "cispo"] = field(
        default="ppo", metadata=stands_for({"cispo": {"delta": 0.0}})
    )
    """What the clip bounds. ppo: the objective, so that clipped tokens have no gradient. cispo: the
    weight of a token, so that clipped tokens keep a gradient (CISPO); it also sets delta to 0."""
    epsilon: float = option(0.2, LOWER_CLIP)
    """Lower clip of the probability ratio, at 1 - epsilon."""
    epsilon_high: float = option(0.2, positive(1000))
    """Upper clip of the probability ratio, at 1 + epsilon_high (larger than epsilon in DAPO)."""
    delta: float = option(3.0, DELTA)
    """Upper bound of the ratio for negative advantages (dual-clip PPO); 0 sets no bound."""
    beta: float = option(0.0, not_negative(1000))
    """Weight of the KL penalty to the frozen reference policy. With 0 there is no reference."""
    kl_in: Literal["loss", "reward"] = "loss"
    """Where the KL penalty goes. loss: it is added to the loss (GRPO). reward: it is subtracted
    from the reward (RLOO, REINFORCE++)."""
    kl_estimator: Literal["k1", "k2", "k3"] = "k3"
    """How the KL is estimated from sampled tokens (k1, k2 and k3 of Schulman 2020)."""
    use_bias_correction_kl: bool = True
    """Multiply the KL in the loss by the probability ratio, so that its gradient is that of the KL
    (TRL). Without it, k3 has about the gradient of KL(reference || policy) (GRPO's paper, verl)."""
    reward_coef: float = option(1.0, not_negative(1000))
    """Weight of the advantages from rewards. 0, with a teacher: rewards are logged but not used."""
    distill_coef: float = option(0.0, not_negative(1000))
    """Weight of the advantages from --teacher.model: at each token, the teacher's log-probability
    minus the policy's (the reverse KL; docs/distillation.md). 0: there is no teacher."""
    entropy_coef: float = option(0.0, not_negative(1000))
    """Weight of an entropy bonus, which makes the update raise the policy's entropy."""
    rollout_correction: Literal[
        "none", "token_truncate", "token_mask", "sequence_truncate", "sequence_mask"
    ] = "none"
    """Importance weights for the difference between the distribution that the rollout samples from
    (with top_p, top_k and 8-bit weights) and the trained policy. They are per token or per
    response. A weight above the cap is truncated to it (TIS) or set to 0 (MIS)."""
    rollout_correction_cap: float = option(2.0, CAP)
    """Cap of the importance weights of rollout_correction."""
    dynamic_sampling: int = option(0, count(0, 1000))
    """Maximum number of extra prompt batches per iteration. They replace groups whose rewards are
    all equal, which give no gradient (DAPO). 0 keeps these groups."""
    overlong_buffer: float = option(0.0, FRACTION_OR_ZERO)
    """Share of max_completion_length, at its end, in which a longer response loses more of its
    reward, linearly up to overlong_penalty (DAPO's soft overlong punishment). 0 turns it off."""
    overlong_penalty: float = option(1.0, not_negative(1000))
    """With overlong_buffer, the number subtracted from a reward at max_completion_length."""
    num_iterations: int = option(1, count(1, 1000))
    """Number of passes over each batch of rollouts (PPO epochs; mu in the paper of GRPO)."""
    mini_batch_size: int = auto(RESPONSES)
    """Prompts per optimizer step: a divisor of --rollout.prompts_per_step. auto: all prompts."""
    tokens_per_micro_batch: int = option(8192, COUNT)
    """Maximum number of tokens (rows x padded length, on all devices together) in one forward and
    backward pass. Gradients of several passes accumulate."""
    loss_aggregation: Literal["token", "sequence", "constant"] = "token"
    """How the loss is averaged. token: over all tokens of a mini-batch (DAPO). sequence: over the
    tokens of each response, and then over responses (GRPO's paper). constant: its sum is divided by
    a constant, the number of responses times max_completion_length (Dr. GRPO)."""
    router_replay: bool = True
    """Train a mixture of experts with the experts that computed each token in the rollout. If it is
    off, the routers choose again. The rollout records its experts in both cases."""
    router_aux_loss_coef: float = option(0.0, not_negative(1000))
    """Weight of the loss that balances the load of a mixture of experts (Switch Transformer, eq. 4;
    docs/models.md). 0, which is usual in reinforcement learning, turns it off."""
    truncated: Literal["mask", "score"] = "score"
    """Responses cut at max_completion_length. mask: leave them out of the loss. score: treat them
    like others. Averages over tokens or responses count only responses in the loss; with
    loss_aggregation constant, the divisor counts all."""

    def __post_init__(self):
        super().__post_init__()
        if self.is_by_function:
            self._check_by_function()
        self._check_rewards()
        self._check_loss()

    @property
    def is_relative(self) -> bool:
        """Whether advantages compare a response with the other responses to its prompt."""
        return self.baseline not in ("none", "critic")

    @property
    def has_critic(self) -> bool:
        return self.baseline == "critic"

    @property
    def penalizes_kl(self) -> bool:
        """Whether the KL to the reference is part of the reward."""
        return self.beta > 0 and self.kl_in == "reward"

    @property
    def is_by_function(self) -> bool:
        """Whether each reward function's scores are compared separately (GDPO)."""
        return self.multi_objective_aggregation == "normalize_then_sum"

    @property
    def title(self) -> str:
        """The algorithm's name and its overridden options, such as `dapo (epsilon_high 0.3)`."""
        parts = ALGORITHMS[self.name]
        changed = [
            f"{part} {getattr(self, part)}" for part in parts if getattr(self, part) != parts[part]
        ]
        changed += [f"loss {self.loss}"] * bool(self.loss)
        return f"{self.name} ({', '.join(changed)})" if changed else self.name

    def _check_by_function(self) -> None:
        """Raises OptionError if an option has no effect where each reward function's scores are
        compared separately."""
        alone = "with --algorithm.multi_objective_aggregation normalize_then_sum"
        unsummed = f"{alone}, which has no sum of rewards"
        self.need_defaults(("baseline", "scale_rewards"), alone)
        self.need("kl_in", not self.penalizes_kl, f"loss {unsummed} to subtract from")
        self.need_defaults(("overlong_buffer", "missing_eos_penalty", "reward_clip"), unsummed)

    def _check_rewards(self) -> None:
        """Raises OptionError if options of rewards exclude each other, or have no effect."""
        baseline = f"with --algorithm.baseline {self.baseline}"
        if self.scale_rewards != "none":
            whitens = "none with --algorithm.whiten_advantages, which scales already"
            none_compared = f"none {baseline}: no group is compared; whiten_advantages scales"
            self.need("scale_rewards", not self.whiten_advantages, whitens)
            self.need("scale_rewards", self.is_relative, none_compared)
            scales = f"with --algorithm.scale_rewards {self.scale_rewards}, which scales already"
            self.need_defaults(["normalize_reward"], scales)
        if not self.is_relative:
            every_signal = f"{baseline}, to which every response is a signal"
            self.need_defaults(["dynamic_sampling"], every_signal)
        if not self.penalizes_kl:
            steered = "without --algorithm.beta, which it steers, and --algorithm.kl_in reward"
            self.need_defaults(["kl_target"], steered)
        if not self.kl_target:
            of_target = "without --algorithm.kl_target, which it belongs to"
            self.need_defaults(["kl_horizon"], of_target)
        if not self.has_critic:
            self.need_defaults(OF_CRITICS, f"{baseline}, which has no critic")

    def _check_loss(self) -> None:
        """Raises OptionError if options of the loss exclude each other."""
        self.need(
            "delta",
            self.surrogate != "cispo" or not self.delta,
            "0 with --algorithm.surrogate cispo, which has no gain to bound",
        )
        self.need(
            "kl_estimator",
            not self.beta or self.kl_in == "reward" or self.kl_estimator != "k1",
            "k2 or k3 with --algorithm.kl_in loss: the gradient of k1 is zero in the mean",
        )
        self.need(
            "reward_coef",
            self.reward_coef > 0 or self.distill_coef > 0,
            "above 0 without a teacher (--algorithm.name distill), as nothing would be learned",
        )
        self.need(
            "reward_coef",
            self.reward_coef > 0 or not self.has_critic,
            "above 0 with --algorithm.baseline critic, which learns from rewards alone",
        )


@dataclass(frozen=True)
class WarmStartConfig(Options):
    """A short supervised stage on generated demonstrations (built-in tasks only)."""

    SECTION = "warm_start."

    steps: int = option(0, STEPS)
    """Supervised steps before reinforcement learning; 0 skips the stage."""


def check_signal(rollout: RolloutConfig, algorithm: AlgorithmConfig) -> None:
    """Raises OptionError if responses to one prompt are compared, but cannot differ."""
    why = "where something is trained: an advantage compares the responses to one prompt"
    for name, is_valid, expected in (
        ("num_generations", rollout.num_generations > 1 or not algorithm.is_relative, "at least 2"),
        ("temperature", rollout.temperature > 0, "above 0"),
        ("top_k", rollout.top_k != 1, "0 or at least 2"),
    ):
        require(is_valid, f"rollout.{name}", getattr(rollout, name), f"{expected} {why}")
