"""Reads the problems that an evaluation's options name, and finds its reward functions.

Knows options and files. Does not know models.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from pat_jax.config.rollout import RolloutConfig
from pat_jax.config.task import TaskChoice
from pat_jax.rl.text.tokenizer import Tokenizer
from pat_jax.run.start.heldout import HeldoutSet
from pat_jax.run.start.task import (
    check_sets,
    columns_of,
    note_of,
    problem_reader,
    read_sets,
)


@dataclass(frozen=True)
class ProblemSets:
    rewards: Sequence[str]
    sets: Sequence[HeldoutSet]
    columns: Sequence[str]  # names of the columns that at least one problem has
    notes: Sequence[str]  # for the user, such as how many problems were too long
    left_out: Mapping[str, Mapping[str, int]]  # number of problems left out, by set and reason

    def fitted(
        self, rollout: RolloutConfig, num_generations: int, num_devices: int
    ) -> RolloutConfig:
        """Returns `rollout` with only the rows and prompt length that `num_generations` responses
        to each of these problems need."""
        prompts = [prompt for one in self.sets for prompt in one.prompts]
        samples = len(prompts) * num_generations
        rows = min(rollout.prompts_per_step, math.ceil(samples / num_devices) * num_devices)
        longest = min(rollout.max_prompt_length, max(len(prompt.tokens) for prompt in prompts))
        return replace(rollout, prompts_per_step=rows, max_prompt_length=longest)


def load_problem_sets(asked: TaskChoice, tokenizer: Tokenizer) -> ProblemSets:
    """Reads the problem sets. Raises UserError if a file cannot be used."""
    rewards = asked.rewards("math")
    read = problem_reader(asked, tokenizer, rewards, "--max_prompt_length")
    splits = read_sets("data", asked.eval.data, read)
    check_sets(splits, rewards, "raise --max_prompt_length, or give other files")
    most = asked.eval.num_prompts
    return ProblemSets(
        rewards,
        [HeldoutSet.of(name, one.heldout, most) for name, one in splits.items()],
        columns_of(prompt for one in splits.values() for prompt in one.heldout),
        [note_of(tokenizer), *(f"{name}: {one}" for name, one in splits.items())],
        {
            name: {
                "too_long": len(one.read.too_long),
                "without_answer": len(one.read.report.without_answer),
            }
            for name, one in splits.items()
        },
    )
