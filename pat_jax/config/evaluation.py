"""Options of the evaluation in training, and what every evaluation has to be."""

from collections.abc import Sequence
from dataclasses import dataclass

from pat_jax.common.rules import (
    RESPONSES,
    STEPS,
    TEMPERATURE,
    Rule,
    check,
    count,
    require,
)

LARGEST_REWARD = 1e6
REWARD: Rule = (
    lambda x: abs(x) <= LARGEST_REWARD,
    f"a number from {-LARGEST_REWARD:,.0f} to {LARGEST_REWARD:,.0f}",
)


@dataclass(frozen=True)
class EvalConfig:
    """Held-out evaluation."""

    every: int = 20
    """Iterations between two evaluations; 0 evaluates never. The first and the last policy are
    always evaluated otherwise."""
    num_prompts: int = 256
    """Held-out prompts, kept apart from training; of several --eval.data files so many of each."""
    data: tuple[str, ...] = ()
    """Files of problems to evaluate on, or datasets of the Hugging Face Hub (the split test, unless
    named), read like those of --data, each with metrics of its own; none holds out a tenth of --data."""
    num_generations: int = 1
    """Responses sampled for each of these prompts; of k there are eval/pass@k and eval/maj@k too."""
    temperature: float = 1.0
    """Sampling temperature of the evaluation; 0 is greedy."""
    pass_threshold: float = 1.0
    """Reward from which on a response passes, for pass@k and maj@k."""
    num_completions_to_print: int = 2
    """Responses shown at each evaluation, to the same prompts every time; 0 shows none."""

    def __post_init__(self):
        check(self, "num_prompts num_generations", RESPONSES, "eval.")
        check(self, "temperature", TEMPERATURE, "eval.")
        check(self, "pass_threshold", REWARD, "eval.")
        check_samples_differ(self.num_generations, self.temperature, "eval.")
        check(self, "num_completions_to_print", count(0, 1000), "eval.")
        check_schedule(self, self.every, self.data)


def check_samples_differ(num_generations: int, temperature: float, section: str = "") -> None:
    """
    Raises:
      OptionError: several samples of one prompt would all be the same.
    """
    require(
        num_generations == 1 or temperature > 0,
        f"{section}temperature",
        temperature,
        f"above 0 with --{section}num_generations {num_generations}: greedy samples are all the same",
    )


def check_schedule(config: object, every: int, data: Sequence[str]) -> None:
    """
    Raises:
      OptionError: how often, or on which files, is no schedule of evaluations.
    """
    check(config, "every", STEPS, "eval.")
    check(config, "data", (all, "names that are not empty"), "eval.")
    never = "none with --eval.every 0, which never evaluates"
    require(every > 0 or not data, "eval.data", " ".join(data), never)
