"""Options of rewards and advantages: what is done to a reward before it is learned from."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

from pat_jax.common.options.declared import Options, option
from pat_jax.common.rules import COUNT, Rule, not_negative

UP_TO_ONE: Rule = (lambda x: 0 <= x <= 1, "a number from 0 to 1")
# Options that only a critic gives an effect.
OF_CRITICS = ("gamma", "lam", "value_clip", "whiten_rewards")


@dataclass(frozen=True)
class AdvantageOptions(Options):
    """How rewards become advantages and returns."""

    SECTION = "algorithm."

    multi_objective_aggregation: Literal["sum_then_normalize", "normalize_then_sum"] = (
        "sum_then_normalize"
    )
    """What becomes of several rewards: their weighted sum is compared within a group, or each is
    compared and scaled by itself, and the weighted sum of that is scaled over the iteration
    (GDPO)."""
    reward_adjustment: Literal["none", "variance"] = "none"
    """Change the rewards of a group before they are compared: none, or variance, which moves them
    apart as far as their mean, their order, the highest and the lowest allow (GRPOVI)."""
    gamma: float = option(1.0, UP_TO_ONE)
    """Discount per token of later rewards, with a critic."""
    lam: float = option(0.95, UP_TO_ONE)
    """Lambda of generalized advantage estimation, with a critic: 0 trusts the critic's value of the
    next token, 1 only the rewards up to the end of the response."""
    value_clip: float = option(0.2, not_negative(10**6))
    """How far a value may move from the one before the update until the critic's loss no longer
    pulls it on, in units of the reward; 0: no clip."""
    whiten_rewards: bool = False
    """Divide the rewards of tokens, KL included, by their standard deviation over the iteration,
    with a critic (TRL)."""
    kl_target: float = option(0.0, not_negative(1000))
    """KL to the reference in nats, mean over tokens, towards which beta is steered from iteration to
    iteration (Ziegler 2019), with kl_in reward; 0: beta is fixed."""
    kl_horizon: int = option(10_000, COUNT)
    """Responses over which beta changes by at most about a fifth; the more, the slower."""
    reward_clip: float = option(0.0, not_negative(10**6))
    """Limit of rewards to both sides of 0, after normalize_reward; 0: none."""
    normalize_reward: bool = False
    """Subtract the mean of all rewards of the run so far, and divide by their standard deviation."""
    missing_eos_penalty: float = option(0.0, not_negative(10**6))
    """What a response loses of its reward if it is cut at max_completion_length."""


def reward_rules(algorithm: Any) -> Iterator[tuple[str, bool, str]]:
    """Yields options that need a sum of rewards or a comparison, whether it is made, and what is
    expected where it is not.

    Args:
      algorithm: the whole `AlgorithmConfig`, whose file imports this one.
    """
    if algorithm.is_by_function:
        alone = "with --algorithm.multi_objective_aggregation normalize_then_sum"
        unsummed = f"{alone}, which has no sum of rewards"
        yield "baseline", algorithm.baseline == "group", f"group {alone}"
        yield "scale_rewards", algorithm.scale_rewards == "group", f"group {alone}"
        yield "kl_in", not algorithm.penalizes_kl, f"loss {unsummed} to subtract from"
        for name in ("overlong_buffer", "missing_eos_penalty"):
            yield name, not getattr(algorithm, name), f"0 {unsummed} to subtract from"
        yield "reward_clip", not algorithm.reward_clip, f"0 {unsummed} to clip"
        is_plain = algorithm.reward_adjustment == "none"
        words = f"none {alone}, which scales the variance of each reward already"
        yield "reward_adjustment", is_plain, words
    yield (
        "reward_adjustment",
        algorithm.reward_adjustment == "none" or algorithm.is_relative,
        f"none with --algorithm.baseline {algorithm.baseline}: no group is compared",
    )
