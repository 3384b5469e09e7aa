"""What the options of rewards have to be: `reward_*` of a run."""

from collections.abc import Sequence
from typing import Protocol

from pat_jax.common.rules import MEMORY_GIB, check, count, matches, positive, require

_VARIABLE = matches(r"|[A-Za-z_]\w*", "the name of an environment variable, or nothing")
_SMALLEST, _LARGEST = 1e-6, 1e6  # beyond them a weight is as good as none, or as all


class RewardOptions(Protocol):
    @property
    def reward(self) -> Sequence[str]: ...

    @property
    def reward_weights(self) -> Sequence[float]: ...


def check_rewards(config: RewardOptions) -> None:
    """
    Raises:
      OptionError: a number is out of bounds, or the weights are not of the rewards.
    """
    check(config, "reward_timeout", positive(86_400))
    check(config, "reward_workers", count(0, 1024))
    check(config, "reward_memory", MEMORY_GIB)
    check(config, "reward_retries", count(0, 100))
    check(config, "reward_token_env", _VARIABLE)
    _check_weights(config.reward_weights, config.reward)


def _check_weights(weights: Sequence[float], names: Sequence[str]) -> None:
    def need(is_valid: bool, expected: str) -> None:
        require(is_valid, "reward_weights", " ".join(f"{weight:g}" for weight in weights), expected)

    need(
        all(x == 0 or _SMALLEST <= abs(x) <= _LARGEST for x in weights),
        f"numbers of size {_SMALLEST:g} to {_LARGEST:,.0f}, or 0",
    )
    need(
        len(weights) in (0, len(names)),
        f"one number for each of the {len(names)} in --reward ({' '.join(names)}), or none",
    )
    need(not weights or any(weights), "one at least that is not 0")
