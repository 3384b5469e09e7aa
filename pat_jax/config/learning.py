"""Options of learning: the algorithm, the optimizer, the supervised stage before."""

from dataclasses import dataclass
from typing import Literal

from pat_jax.common.rules import (
    COUNT,
    FRACTION,
    LEARNING_RATE,
    RESPONSES,
    STEPS,
    Rule,
    check,
    count,
    not_negative,
    positive,
    require,
)
from pat_jax.config.rollout import RolloutConfig

DUAL_CLIP: Rule = (lambda x: x == 0 or 1 < x <= 1000, "0 (off) or a number above 1, at most 1000")


@dataclass(frozen=True)
class AlgorithmConfig:
    """GRPO (Shao et al. 2024, arXiv 2402.03300) and its common variants."""

    epsilon: float = 0.2
    """Lower clip of the probability ratio."""
    epsilon_high: float = 0.2
    """Upper clip of the probability ratio (DAPO's clip-higher when above epsilon)."""
    dual_clip: float = 3.0
    """Most that the ratio counts for where the advantage is negative (dual-clip PPO); 0: no bound."""
    beta: float = 0.0
    """Weight of the KL penalty to the frozen reference policy; 0 keeps no reference in memory."""
    num_iterations: int = 1
    """Passes over each batch of rollouts (the inner epochs, mu in the paper)."""
    mini_batch_size: int = 32
    """Prompts in one optimizer step."""
    tokens_per_micro_batch: int = 8192
    """Token budget (rows x padded length, all devices together) of one forward-backward pass;
    gradients accumulate over the rest."""
    scale_rewards: Literal["group", "none"] = "group"
    """Divide centred rewards by the group's standard deviation (GRPO), or not (Dr. GRPO, together
    with loss_aggregation constant)."""
    loss_aggregation: Literal["token", "sequence", "constant"] = "token"
    """Average the loss over all tokens of a mini-batch (DAPO), over the tokens of each response and
    then over responses (GRPO's paper), or add it up and divide by a constant, the responses times
    max_completion_length (Dr. GRPO)."""
    truncated: Literal["mask", "score"] = "score"
    """Responses cut at max_completion_length: leave them out of the loss, or score them like any
    other. Averages over tokens or responses are over those left in; constant divides by all."""

    def __post_init__(self):
        check(self, "epsilon", FRACTION, "algorithm.")
        check(self, "epsilon_high", positive(1000), "algorithm.")
        check(self, "dual_clip", DUAL_CLIP, "algorithm.")
        check(self, "beta", not_negative(1000), "algorithm.")
        check(self, "num_iterations", count(1, 1000), "algorithm.")
        check(self, "mini_batch_size", RESPONSES, "algorithm.")
        check(self, "tokens_per_micro_batch", COUNT, "algorithm.")


@dataclass(frozen=True)
class OptimizerConfig:
    """AdamW with linear warm-up, then a constant or cosine rate."""

    learning_rate: float = 1e-6
    """Peak learning rate."""
    schedule: Literal["constant", "cosine"] = "constant"
    """What follows the warm-up."""
    warmup_steps: int = 0
    """Optimizer steps of linear warm-up."""
    weight_decay: float = 0.0
    """Decoupled weight decay; norms and biases are exempt."""
    b1: float = 0.9
    """Decay of the first moment."""
    b2: float = 0.95
    """Decay of the second moment."""
    max_grad_norm: float = 1.0
    """Global-norm gradient clipping."""

    def __post_init__(self):
        check(self, "learning_rate", LEARNING_RATE, "optimizer.")
        check(self, "weight_decay", not_negative(100), "optimizer.")
        check(self, "warmup_steps", STEPS, "optimizer.")
        check(self, "max_grad_norm", positive(10**6), "optimizer.")
        check(self, "b1 b2", (lambda x: 0 <= x < 1, "a number in [0, 1)"), "optimizer.")


@dataclass(frozen=True)
class WarmStartConfig:
    """A short supervised stage on generated demonstrations (built-in tasks only)."""

    steps: int = 0
    """Supervised steps before reinforcement learning; 0 skips the stage."""
    batch_size: int = 64
    """Demonstrations in one supervised step, at most; those of like length go together."""
    learning_rate: float = 1e-3
    """Peak learning rate of the supervised stage (cosine to zero)."""

    def __post_init__(self):
        check(self, "steps", STEPS, "warm_start.")
        check(self, "batch_size", RESPONSES, "warm_start.")
        check(self, "learning_rate", LEARNING_RATE, "warm_start.")


def check_signal(rollout: RolloutConfig) -> None:
    """Nothing is learned where the responses to a prompt cannot differ: advantages compare them.

    Raises:
      OptionError: they cannot.
    """
    why = "where something is trained: an advantage compares the responses to one prompt"
    for name, is_valid, expected in (
        ("num_generations", rollout.num_generations > 1, "at least 2"),
        ("temperature", rollout.temperature > 0, "above 0"),
        ("top_k", rollout.top_k != 1, "0 or at least 2"),
    ):
        require(is_valid, f"rollout.{name}", getattr(rollout, name), f"{expected} {why}")


def learning_notes(rollout: RolloutConfig, algorithm: AlgorithmConfig) -> list[str]:
    """What these options make of learning that their names do not say, a sentence each."""
    notes = []
    if rollout.top_p < 1 or rollout.top_k:
        notes.append(
            f"note: --rollout.top_p {rollout.top_p:g} --rollout.top_k {rollout.top_k}: responses are drawn "
            "from a part of the policy's distribution, but the loss is of the whole one, which they "
            "are no exact samples of; ratios and train/behavior_gap are of the whole one"
        )
    if algorithm.scale_rewards == "none" and algorithm.loss_aggregation != "constant":
        notes.append(
            f"note: --algorithm.scale_rewards none with --algorithm.loss_aggregation "
            f"{algorithm.loss_aggregation} is not Dr. GRPO, which takes constant"
        )
    return notes
