"""Reads what a run learns from, by its options. All mistakes in files are found here."""

from collections.abc import Sequence
from typing import TypeVar

from pat_jax.common.errors import UserError
from pat_jax.config.fine_tuning import FineTuning
from pat_jax.config.reward_model import RewardModelConfig
from pat_jax.config.sft import SftConfig
from pat_jax.models.config import ModelConfig
from pat_jax.rl.data.example_files import ExampleColumns
from pat_jax.rl.data.examples import ExampleReader, Examples, Read
from pat_jax.rl.data.pair_files import PairColumns
from pat_jax.rl.data.pairs import PairReader, PairsRead
from pat_jax.rl.data.text_reader import TextRead
from pat_jax.run.sft.inputs import find_data, load_tokenizer
from pat_jax.run.sft.lessons import ExampleLessons, Lessons, PreferenceLessons, RewardLessons

Found = TypeVar("Found", Read | TextRead, PairsRead)


def read_lessons(config: FineTuning, model: ModelConfig) -> Lessons:
    """Reads the examples or pairs to learn from and to evaluate on, from the same or other files.

    Raises:
      UserError: a file or a row cannot be used, or nothing is left to learn from.
    """
    match config:
        case RewardModelConfig():
            return _reward_lessons(config, model)
        case SftConfig(loss="dpo"):
            return _preference_lessons(config, model)
        case SftConfig():
            return _example_lessons(config, model)
    raise TypeError(f"{type(config).__name__} has no lessons")


def _example_lessons(config: SftConfig, model: ModelConfig) -> ExampleLessons:
    data = config.data
    keys = data.prompt_key, data.completion_key, data.messages_key, data.text_key
    reader = ExampleReader(
        load_tokenizer(config, config.data, model),
        config.max_length,
        is_truncated=config.truncate,
        columns=ExampleColumns(*keys),
        completion_only=config.completion_only_loss,
        assistant_only=config.assistant_only_loss,
        option="--max_length",
    )
    read, evaluated, note = _read(config, config.data.files, reader)
    per_byte = evaluated.heldout.tokens_per_byte if isinstance(evaluated, TextRead) else None
    return ExampleLessons(
        Examples(read.train, seed=config.seed), _spread(config, evaluated.heldout), note, per_byte
    )


def _reward_lessons(config: RewardModelConfig, model: ModelConfig) -> RewardLessons:
    data = config.data
    columns = PairColumns(data.prompt_key, data.chosen_key, data.rejected_key, data.margin_key)
    tokenizer = load_tokenizer(config, data, model)
    reader = PairReader(tokenizer, config.max_length, True, columns, "--max_length")
    read, evaluated, note = _read(config, data.files, reader)
    heldout = _spread(config, evaluated.heldout)
    center = config.center_rewards_coefficient
    return RewardLessons(Examples(read.train, seed=config.seed), heldout, note, center)


def _preference_lessons(config: SftConfig, model: ModelConfig) -> PreferenceLessons:
    data = config.data
    columns = PairColumns(data.prompt_key, data.chosen_key, data.rejected_key)
    tokenizer = load_tokenizer(config, data, model)
    reader = PairReader(tokenizer, config.max_length, False, columns, "--max_length")
    read, evaluated, note = _read(config, data.files, reader)
    heldout = _spread(config, evaluated.heldout)
    return PreferenceLessons(Examples(read.train, seed=config.seed), heldout, note, config.beta)


def _read(config, names, reader):
    files = find_data("data", names)
    evaluated_files = find_data("eval.data", config.eval.data, split="test")
    is_split = config.eval.every > 0 and not config.eval.data
    read = reader.read(files, config.eval.share if is_split else 0.0)
    evaluated = reader.read(evaluated_files, 1.0) if evaluated_files else read
    if not read.train:
        raise UserError(
            f"option --data is {' '.join(names)!r}, which leaves nothing to learn from "
            f"({read}): expected some examples or text; raise --max_length, take --truncate, or use more data."
        )
    if config.eval.every and not evaluated.heldout:
        raise UserError(
            f"there is nothing to evaluate ({evaluated}): expected at least one held-out example; use "
            "more data, raise --eval.share, give --eval.data, or take --eval.every 0."
        )
    note = str(read) if read is evaluated else f"{read}\neval.data, {evaluated}"
    return read, evaluated, note
