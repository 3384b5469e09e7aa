"""A run's task: prompts, held-out prompts, their tokenizer, rewards and demonstrations."""

import glob
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path

import numpy as np

from pat_jax.common.errors import UserError
from pat_jax.common.hub import dataset_files, is_checkpoint, local_checkpoint
from pat_jax.common.patterns import matches
from pat_jax.config.data import ARITHMETIC
from pat_jax.config.task import TaskChoice
from pat_jax.rl.batches.types import Prompt
from pat_jax.rl.data import arithmetic
from pat_jax.rl.data.epochs import START
from pat_jax.rl.data.problems import (
    HELDOUT_SHARE,
    Problems,
    ProblemSplits,
    checksum_of,
    load_problems,
)
from pat_jax.rl.data.schemas import ProblemSchema
from pat_jax.rl.rewards.built_in import COMPARING, check_columns
from pat_jax.rl.text.tokenizer import Chat, HuggingFaceTokenizer, Tokenizer
from pat_jax.rl.text.turn_end import stop_at_turn_end
from pat_jax.run.start.heldout import HELDOUT, HeldoutSet, set_names

Demonstration = tuple[Sequence[int], Sequence[int]]  # prompt tokens, response tokens


@dataclass(frozen=True)
class Task:
    tokenizer: Tokenizer
    rewards: Sequence[str]  # names from --reward, `auto` replaced
    train: Problems | arithmetic.ArithmeticProblems
    heldout: Sequence[HeldoutSet]
    demonstrations: Callable[[int, int], list[Demonstration]] | None  # (step, how many), if any
    columns: Sequence[str]  # every column that some prompt has
    note: str = ""  # for the user, such as how many prompts were too long

    @cached_property
    def checksums(self) -> dict[str, int]:
        """Checksums of the training and held-out problems; a resumed run should have the same."""
        heldout = checksum_of(prompt for one in self.heldout for prompt in one.prompts)
        return {"train": self.train.checksum, "heldout": heldout}


def check_task(asked: TaskChoice) -> None:
    """Checks that the options of the task fit each other; reads no file. Raises UserError if
    `asked.data` names no task that the model can do."""
    if asked.data.is_arithmetic:
        _check_arithmetic(asked, is_checkpoint(asked.model))
        return
    files = find_files("data", asked.data.files)
    find_files("eval.data", asked.eval.data, split="test")
    if not is_checkpoint(asked.model):  # after the data, which is less to download
        raise UserError(
            f"option --data is {str(files[0])!r}, which needs a tokenizer, but --model is "
            f"{asked.model!r}, which is no Hugging Face checkpoint directory, and no model of the "
            "Hugging Face Hub as owner/name; give one."
        )
    if asked.demonstrations:
        raise UserError(
            f"option --warm_start.steps is {asked.demonstrations}: data files have no "
            "demonstrations; set it to 0, or use --data arithmetic."
        )


def find_files(
    option: str,
    names: Sequence[str],
    otherwise: str = f", and the only built-in task is {ARITHMETIC!r}",
    *,
    split: str = "train",
) -> list[Path]:
    """Returns the files that `names` stand for, each once. A name is a file, a pattern or a dataset
    of the Hub, whose default split is `split`. Raises UserError if a name stands for no file;
    `otherwise` tells what else it could have meant."""
    found: dict[Path, None] = {}
    for name in names:
        found_here = dataset_files(name, option, split)
        if not found_here and os.path.exists(name):
            found_here = [name]
        elif not found_here and glob.has_magic(name):
            found_here = matches(name, option)
        if not found_here:
            raise UserError(
                f"option --{option} is {name!r}: no such file{otherwise}; give .json, .jsonl or "
                ".parquet files, or a dataset of the Hugging Face Hub as owner/name."
            )
        found |= dict.fromkeys(map(Path, found_here))
    return list(found)


def _check_arithmetic(asked: TaskChoice, is_directory: bool) -> None:
    longest = arithmetic.MAX_PROMPT_LENGTH
    if is_directory:
        raise UserError(
            "option --data is 'arithmetic', which has its own tokenizer, but --model is the "
            f"directory {asked.model!r}; give a data file, or a built-in model."
        )
    asked.data.check_unused()
    if asked.eval.data:
        raise UserError(
            f"option --eval.data is {' '.join(asked.eval.data)!r}: the built-in task holds out "
            "problems of its own; leave it out, or give --data files."
        )
    length = asked.rollout.max_prompt_length
    if length is not None and length < longest:
        raise UserError(
            f"option --rollout.max_prompt_length is {length}: the prompts "
            f"of 'arithmetic' have up to {longest} tokens; choose at least that."
        )


def load_tokenizer(asked: TaskChoice) -> Tokenizer:
    if asked.data.is_arithmetic:
        return arithmetic.TOKENIZER
    tokenizer = HuggingFaceTokenizer(
        local_checkpoint(asked.model, weights=False),
        Chat(asked.data.system_prompt, asked.data.template_variables),
        skip_special_tokens=asked.skips_special_tokens,
    )
    stop_at_turn_end(tokenizer)
    return tokenizer


def load_task(asked: TaskChoice, tokenizer: Tokenizer) -> Task:
    """Loads the task that `asked.data` names. Raises UserError if a file cannot be used."""
    if asked.data.is_arithmetic:
        return _arithmetic(asked)
    rewards = asked.rewards("math")
    read = problem_reader(asked, tokenizer, rewards)
    is_split = asked.eval.every > 0 and not asked.eval.data
    files = find_files("data", asked.data.files)
    splits = read(files, heldout_share=HELDOUT_SHARE if is_split else 0.0)
    _check_train(splits, asked.rollout.prompts_per_step)
    sets = {HELDOUT: splits} if is_split else {}
    notes = [note_of(tokenizer), str(splits)]
    for name, found in read_sets("eval.data", asked.eval.data, read).items():
        sets[name] = found
        notes.append(f"{found}{_overlap(splits.train, found.heldout)}")
    check_sets(sets, rewards, "use more data, or --eval.every 0")
    for prompt in splits.train:
        check_columns(rewards, prompt.columns, splits.train.name)
    heldout = [HeldoutSet.of(name, x.heldout, asked.eval.num_prompts) for name, x in sets.items()]
    prompts = [*splits.train, *(prompt for one in sets.values() for prompt in one.heldout)]
    return Task(
        tokenizer,
        rewards,
        splits.train,
        heldout,
        None,
        columns_of(prompts),
        "\n".join(filter(None, notes)),
    )


def note_of(tokenizer: Tokenizer | None) -> str:
    """Returns a note for the user on the tokens that end a response, or ""."""
    return tokenizer.note if isinstance(tokenizer, HuggingFaceTokenizer) else ""


def problem_reader(
    asked: TaskChoice,
    tokenizer: Tokenizer,
    rewards: Sequence[str],
    option: str = "--rollout.max_prompt_length",
) -> Callable[..., ProblemSplits]:
    """Returns `load_problems` with all arguments bound except for the files and `heldout_share`.
    Messages call the limit of a prompt's length `option`."""
    is_compared = any(reward in COMPARING for reward in rewards)
    return partial(
        load_problems,
        tokenizer=tokenizer,
        seed=asked.seed,
        max_prompt_length=asked.rollout.max_prompt_length,
        schema=ProblemSchema(asked.data.prompt_key, asked.data.answer_key, is_compared),
        bad_rows=asked.data.bad_rows,
        option=option,
    )


def read_sets(
    option: str, words: Sequence[str], read: Callable[..., ProblemSplits]
) -> dict[str, ProblemSplits]:
    """Reads a set of held-out problems for each word, which is a file, a pattern or a dataset.
    Returns the sets by name."""
    files = [find_files(option, [word], split="test") for word in words]
    return {
        name: read(paths, heldout_share=1.0)
        for name, paths in zip(set_names(words), files, strict=True)
    }


def check_sets(sets: Mapping[str, ProblemSplits], rewards: Sequence[str], advice: str) -> None:
    """Raises UserError if a set has no problems (the message ends with `advice`), or if it lacks a
    column that a reward compares with."""
    for one in sets.values():
        name = one.heldout.name
        if not len(one.heldout):
            raise UserError(
                f"{name} has no prompts to evaluate ({one}): expected at least one; {advice}."
            )
        for prompt in one.heldout:
            check_columns(rewards, prompt.columns, name)


def columns_of(prompts: Iterable[Prompt]) -> list[str]:
    return sorted({name for prompt in prompts for name in prompt.columns})


def _overlap(train: Problems, heldout: Problems) -> str:
    """Returns a clause on how many held-out problems are trained on as well, or ""."""
    trained = {prompt.text for prompt in train}
    count = sum(prompt.text in trained for prompt in heldout)
    return f"; {count} of them are trained on as well" if count else ""


def _check_train(splits: ProblemSplits, prompts_per_step: int) -> None:
    if not len(splits.train):
        raise UserError(
            f"{splits.train.name} leaves nothing to train on ({splits}): expected some problems; "
            "raise --rollout.max_prompt_length or use more data."
        )
    splits.train.draw(START, prompts_per_step)  # refuses a file with too few


def _arithmetic(asked: TaskChoice) -> Task:
    train = arithmetic.problems(asked.seed, "train")
    shown = arithmetic.problems(asked.seed + 1_000_003, "train")  # not the problems practised
    longest = asked.rollout.max_completion_length

    def demonstrations(step: int, size: int) -> list[Demonstration]:
        rng = np.random.default_rng((asked.seed, step))
        # Cut like a response: nothing is compiled for longer rows.
        return [
            (prompt.tokens, arithmetic.demonstration(prompt, rng)[:longest])
            for prompt in shown.batch(step, size)
        ]

    heldout = arithmetic.problems(asked.seed, "heldout").first(asked.eval.num_prompts)
    sets = [HeldoutSet(HELDOUT, heldout)]
    note = ""
    if asked.learns and not asked.demonstrations:
        note = (
            f"note: {asked.model!r} begins with random weights and without a warm start: expect no reward; "
            "add --preset demo, or --warm_start.steps"
        )
    return Task(
        arithmetic.TOKENIZER,
        asked.rewards("exact"),
        train,
        sets,
        demonstrations,
        columns_of(heldout),
        note,
    )
