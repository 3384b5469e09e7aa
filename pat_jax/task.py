"""What is learned from: prompts, held-out prompts, their tokenizer, reward and demonstrations."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from pat_jax.config import RunConfig
from pat_jax.errors import UserError
from pat_jax.rl import arithmetic
from pat_jax.rl.data import load_problems
from pat_jax.rl.rewards import check_columns
from pat_jax.rl.tokenizer import HuggingFaceTokenizer, Tokenizer
from pat_jax.rl.types import Prompt

Demonstration = tuple[Sequence[int], Sequence[int]]  # prompt tokens, response tokens


@dataclass(frozen=True)
class Task:
    tokenizer: Tokenizer
    reward: str  # the option's, or what `auto` means here
    train_batch: Callable[[int, int], list[Prompt]]  # (step, prompts) -> prompts, a pure function
    heldout: Sequence[Prompt]
    demonstrations: Callable[[int, int], list[Demonstration]] | None  # (step, how many), if any
    note: str = ""  # what a person should know, such as how many prompts were too long


def check_task(config: RunConfig) -> None:
    """Refuses options that do not go together; reads no file.

    Raises:
      UserError: `config.data` names no task that `config.model` can do.
    """
    is_directory = Path(config.model).is_dir()
    if config.data == "arithmetic":
        _check_arithmetic(config, is_directory)
    elif not Path(config.data).exists():
        raise UserError(
            f"option --data is {config.data!r}: no such file, and the only built-in task is "
            "'arithmetic'; give a .json, .jsonl or .parquet file."
        )
    elif not is_directory:
        raise UserError(
            f"option --data is {config.data!r}, which needs a tokenizer, but --model is "
            f"{config.model!r}, which is no Hugging Face checkpoint directory; give one."
        )
    elif config.warm_start.steps:
        raise UserError(
            f"option --warm_start.steps is {config.warm_start.steps}: data files have no "
            "demonstrations; set it to 0, or use --data arithmetic."
        )


def _check_arithmetic(config: RunConfig, is_directory: bool) -> None:
    longest = arithmetic.TermCounts().max_prompt_length
    if is_directory:
        raise UserError(
            "option --data is 'arithmetic', which has its own tokenizer, but --model is the "
            f"directory {config.model!r}; give a data file, or a built-in model."
        )
    if config.rollout.max_prompt_length < longest:
        raise UserError(
            f"option --rollout.max_prompt_length is {config.rollout.max_prompt_length}: the prompts "
            f"of 'arithmetic' have up to {longest} tokens; choose at least that."
        )


def load_tokenizer(config: RunConfig) -> Tokenizer:
    if config.data == "arithmetic":
        return arithmetic.TOKENIZER
    return HuggingFaceTokenizer(config.model)


def load_task(config: RunConfig, tokenizer: Tokenizer) -> Task:
    """The task that `config.data` names.

    Raises:
      UserError: the file is unusable, with this tokenizer or at all.
    """
    if config.data == "arithmetic":
        return _arithmetic(config)
    splits = load_problems(
        config.data,
        tokenizer,
        seed=config.seed,
        max_prompt_length=config.rollout.max_prompt_length,
    )
    first = splits.train.batch(0, config.rollout.prompts_per_step)  # refuses a file with too few
    reward = "math" if config.reward == "auto" else config.reward
    check_columns(reward, first[0].columns)
    heldout = splits.heldout.first(config.eval.num_prompts)
    if config.eval.every and not heldout:
        raise UserError(
            f"{splits.heldout.name} has no prompts to evaluate: expected at least one; use more "
            "data, or --eval.every 0."
        )
    return Task(tokenizer, reward, splits.train.batch, heldout, None, str(splits))


def _arithmetic(config: RunConfig) -> Task:
    train = arithmetic.problems(config.seed, "train")
    shown = arithmetic.problems(config.seed + 1_000_003, "train")  # not the problems practised
    longest = config.rollout.max_completion_length

    def demonstrations(step: int, size: int) -> list[Demonstration]:
        rng = np.random.default_rng((config.seed, step))
        # Cut where a response would be: no longer row is compiled for.
        return [
            (prompt.tokens, arithmetic.demonstration(prompt, rng)[:longest])
            for prompt in shown.batch(step, size)
        ]

    heldout = arithmetic.problems(config.seed, "heldout").first(config.eval.num_prompts)
    reward = "exact" if config.reward == "auto" else config.reward
    return Task(arithmetic.TOKENIZER, reward, train.batch, heldout, demonstrations)
