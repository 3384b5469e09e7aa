"""What a model is asked in an evaluation, and by which rewards: from options to problems.

Knows options and files. Does not know models.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from pat_jax.config.run import RunConfig
from pat_jax.rl.data import ProblemSplits
from pat_jax.rl.tokenizer import Tokenizer
from pat_jax.run.heldout import HeldoutSet
from pat_jax.run.task import check_sets, columns_of, problem_reader, read_sets, rewards_of


@dataclass(frozen=True)
class Exam:
    rewards: Sequence[str]
    sets: Sequence[HeldoutSet]
    columns: Sequence[str]  # that any problem has
    notes: Sequence[str]  # what a person should know, such as how many problems were too long
    left_out: Mapping[str, Mapping[str, int]]  # problems, by set and reason


def load_exam(config: RunConfig, tokenizer: Tokenizer) -> Exam:
    """
    Raises:
      UserError: a file is unusable, with this tokenizer or at all.
    """
    rewards = rewards_of(config, "math")
    splits = read_sets("data", config.eval.data, problem_reader(config, tokenizer, rewards))
    check_sets(splits, rewards, "raise --max_prompt_length, or give other files")
    most = config.eval.num_prompts
    return Exam(
        rewards,
        [HeldoutSet.of(name, one.heldout, most) for name, one in splits.items()],
        columns_of(prompt for one in splits.values() for prompt in one.heldout),
        [f"{name}: {one}" for name, one in splits.items()],
        {name: _left_out(one) for name, one in splits.items()},
    )


def _left_out(splits: ProblemSplits) -> dict[str, int]:
    return {"too_long": splits.num_too_long, "without_answer": len(splits.without_answer)}
