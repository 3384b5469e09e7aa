"""Reads the examples or pairs of a run, by its options. All mistakes in files are found here."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, Protocol, TypeVar, runtime_checkable

from pat_jax.common.errors import UserError
from pat_jax.config.fine_tuning import FineTuning, HeldoutConfig
from pat_jax.config.sft import RewardModelConfig, SftConfig
from pat_jax.models.config import ModelConfig
from pat_jax.rl.data.example_reader import ExampleReader, PairReader
from pat_jax.rl.data.examples import Each, Example, Examples, Pair
from pat_jax.rl.data.schemas import ExampleSchema, PairSchema
from pat_jax.rl.data.text_reader import TextRows
from pat_jax.run.sft.inputs import find_data, load_tokenizer, padding_of
from pat_jax.run.sft.lessons import ExampleLessons, Lessons, PreferenceLessons, RewardLessons

Each_co = TypeVar("Each_co", bound=Example | Pair, covariant=True)
_LIMIT = "--max_length"  # the option that limits lengths


def kind_of(config: FineTuning) -> type[Lessons]:
    """Returns the kind of lessons that the options ask for: examples, pairs for a reward model, or
    pairs for DPO."""
    match config:
        case RewardModelConfig():
            return RewardLessons
        case SftConfig(loss="dpo"):
            return PreferenceLessons
        case _:
            return ExampleLessons


def read_lessons(config: FineTuning, model: ModelConfig) -> Lessons:
    """Reads the examples or pairs to learn from and to evaluate on, from the same or other files.
    Raises UserError if a file or a row cannot be used, or nothing is left to learn from."""
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
    schema = ExampleSchema(data.prompt_key, data.completion_key, data.messages_key, data.text_key)
    reader = ExampleReader(
        load_tokenizer(config.model, data, model),
        config.max_length,
        is_truncated=config.truncate,
        schema=schema,
        completion_only=config.completion_only_loss,
        assistant_only=config.assistant_only_loss,
        option=_LIMIT,
        bad_rows=data.bad_rows,
    )
    found = _read(config.eval, data.files, reader)
    rows = found.evaluated.heldout
    per_byte = rows.tokens_per_byte if isinstance(rows, TextRows) else None
    train, heldout, note = found.parts(config.seed)
    return ExampleLessons(train, heldout, note, per_byte)


def _reward_lessons(config: RewardModelConfig, model: ModelConfig) -> RewardLessons:
    data = config.data
    tokenizer = load_tokenizer(config.model, data, model)
    reader = PairReader(
        tokenizer,
        config.max_length,
        is_scored=True,
        schema=PairSchema(data.prompt_key, data.chosen_key, data.rejected_key, data.margin_key),
        pad_id=padding_of(tokenizer)[0],
        option=_LIMIT,
        bad_rows=data.bad_rows,
    )
    train, heldout, note = _read(config.eval, data.files, reader).parts(config.seed)
    has_margin = any(pair.margin for pair in (*train, *heldout))
    center = config.center_rewards_coefficient
    return RewardLessons(train, heldout, note, center, has_margin)


def _preference_lessons(config: SftConfig, model: ModelConfig) -> PreferenceLessons:
    data = config.data
    reader = PairReader(
        load_tokenizer(config.model, data, model),
        config.max_length,
        is_scored=False,
        schema=PairSchema(data.prompt_key, data.chosen_key, data.rejected_key),
        option=_LIMIT,
        bad_rows=data.bad_rows,
    )
    train, heldout, note = _read(config.eval, data.files, reader).parts(config.seed)
    return PreferenceLessons(train, heldout, note, config.beta, config.label_smoothing)


@runtime_checkable
class _Split(Protocol[Each_co]):
    """Training and held-out data that a reader found; `str` of it tells the counts."""

    @property
    def train(self) -> Sequence[Each_co]: ...
    @property
    def heldout(self) -> Sequence[Each_co]: ...


@runtime_checkable
class _Reader(Protocol[Each_co]):
    def read(self, paths: Sequence[Path], heldout_share: float) -> _Split[Each_co]: ...


@dataclass(frozen=True)
class _Found(Generic[Each]):
    read: _Split[Each]
    evaluated: _Split[Each]
    num_evaluated: int  # at most

    def parts(self, seed: int) -> tuple[Examples[Each], list[Each], str]:
        """Returns the first three fields of `Lessons`."""
        train = Examples(self.read.train, seed=seed)
        told = [str(self.read)]
        if self.evaluated is not self.read:
            told.append(f"eval.data, {self.evaluated}")
        return train, _spread(self.evaluated.heldout, self.num_evaluated), "\n".join(told)


def _read(asked: HeldoutConfig, names: Sequence[str], reader: _Reader[Each]) -> _Found[Each]:
    files = find_data("data", names)
    heldout = asked.data
    evaluated_files = find_data("eval.data", heldout, split="test")
    is_split = asked.every > 0 and not heldout
    read = reader.read(files, asked.share if is_split else 0.0)
    evaluated = reader.read(evaluated_files, 1.0) if heldout else read
    if not read.train:
        raise UserError(
            f"option --data is {' '.join(names)!r}, which leaves nothing to learn from "
            f"({read}): expected something; raise --max_length, or use more data."
        )
    if asked.every and not evaluated.heldout:
        raise UserError(
            f"there is nothing to evaluate ({evaluated}): expected at least one held-out example; use "
            "more data, raise --eval.share, give --eval.data, or take --eval.every 0."
        )
    return _Found(read, evaluated, asked.num_examples if asked.every else 0)


def _spread(heldout: Sequence[Each], most: int) -> list[Each]:
    """Returns up to `most` held-out items, evenly spread over all files."""
    count = min(most, len(heldout))
    return [heldout[i * len(heldout) // count] for i in range(count)]
