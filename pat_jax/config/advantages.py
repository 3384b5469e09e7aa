"""Options of rewards and advantages: how a reward is changed before the policy learns from it."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

from pat_jax.common.options.declared import Options, option
from pat_jax.common.rules import COUNT, Rule, not_negative

UP_TO_ONE: Rule = (lambda x: 0 <= x <= 1, "a number from 0 to 1")
# Options that have an effect only with a critic.
OF_CRITICS = ("gamma", "lam", "value_clip", "whiten_rewards")


@dataclass(frozen=True)
class AdvantageOptions(Options):
    """How rewards become advantages and returns."""

    SECTION = "algorithm."

    multi_objective_aggregation: Literal["sum_then_normalize", "normalize_then_sum"] = (
        "sum_then_normalize"
    )
    """How several rewards become an advantage. sum_then_normalize compares their weighted sum
    within a group. normalize_then_sum compares and scales each reward by itself, and scales the
    weighted sum of the results over the iteration (GDPO)."""
    gamma: float = option(1.0, UP_TO_ONE)
    """Discount per token of later rewards, with a critic."""
    lam: float = option(0.95, UP_TO_ONE)
    """Lambda of generalized advantage estimation, with a critic: 0 trusts the critic's value of the
    next token, 1 only the rewards up to the end of the response."""
    value_clip: float = option(0.2, not_negative(10**6))
    """How far an update may move a value, in units of the reward, before the critic's loss no
    longer pulls it on; 0: no clip."""
    whiten_rewards: bool = False
    """Divide the rewards of tokens, KL included, by their standard deviation over the iteration,
    with a critic (TRL)."""
    kl_target: float = option(0.0, not_negative(1000))
    """Target of the KL to the reference, in nats, mean over tokens: each iteration adapts beta to
    reach it (Ziegler 2019), with kl_in reward; 0: beta is fixed."""
    kl_horizon: int = option(10_000, COUNT)
    """Responses over which beta changes by at most about a fifth; larger values adapt it slower."""
    reward_clip: float = option(0.0, not_negative(10**6))
    """Rewards are clipped to ± this limit, after normalize_reward; 0: no limit."""
    normalize_reward: bool = False
    """Subtract the mean of all rewards of the run so far, and divide by their standard deviation."""
    missing_eos_penalty: float = option(0.0, not_negative(10**6))
    """What a response loses of its reward if it is cut at max_completion_length."""


def reward_rules(algorithm: Any) -> Iterator[tuple[str, bool, str]]:
    """Yields for each option that others restrict: its name, whether its value is valid, what is
    expected.

    Args:
      algorithm: the whole `AlgorithmConfig`, whose file imports this one.
    """
    if algorithm.is_by_function:
        yield from _rules_by_function(algorithm)
    baseline = f"with --algorithm.baseline {algorithm.baseline}"
    is_scaled = algorithm.scale_rewards != "none"
    scales = f"with --algorithm.scale_rewards {algorithm.scale_rewards}, which scales already"
    whitens = "none with --algorithm.whiten_advantages, which scales already"
    none_compared = f"none {baseline}: no group is compared; whiten_advantages scales"
    every_signal = f"0 {baseline}, to which every response is a signal"
    steered = "0 without --algorithm.beta, which it steers, and --algorithm.kl_in reward"
    of_target = "its default without --algorithm.kl_target, which it belongs to"
    has_horizon = algorithm.kl_horizon != AdvantageOptions.kl_horizon
    yield "scale_rewards", not (is_scaled and algorithm.whiten_advantages), whitens
    yield "scale_rewards", not is_scaled or algorithm.is_relative, none_compared
    yield "dynamic_sampling", not algorithm.dynamic_sampling or algorithm.is_relative, every_signal
    yield "kl_target", not algorithm.kl_target or algorithm.penalizes_kl, steered
    yield "kl_horizon", algorithm.kl_target > 0 or not has_horizon, of_target
    yield "normalize_reward", not (algorithm.normalize_reward and is_scaled), f"false {scales}"
    for name in () if algorithm.has_critic else OF_CRITICS:
        default = getattr(AdvantageOptions, name)
        expected = f"{str(default).lower()} {baseline}, which has no critic"
        yield name, getattr(algorithm, name) == default, expected


def _rules_by_function(algorithm: Any) -> Iterator[tuple[str, bool, str]]:
    """Yields as `reward_rules` does, if each reward function's scores are compared separately."""
    alone = "with --algorithm.multi_objective_aggregation normalize_then_sum"
    unsummed = f"{alone}, which has no sum of rewards"
    yield "baseline", algorithm.baseline == "group", f"group {alone}"
    yield "scale_rewards", algorithm.scale_rewards == "group", f"group {alone}"
    yield "kl_in", not algorithm.penalizes_kl, f"loss {unsummed} to subtract from"
    for name in ("overlong_buffer", "missing_eos_penalty"):
        yield name, not getattr(algorithm, name), f"0 {unsummed} to subtract from"
    yield "reward_clip", not algorithm.reward_clip, f"0 {unsummed} to clip"
