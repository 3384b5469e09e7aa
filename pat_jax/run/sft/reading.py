"""Reads the examples or pairs of a run, by its options. All mistakes in files are found here."""

from collections.abc import Sequence

from pat_jax.common.errors import UserError
from pat_jax.config.fine_tuning import FineTuning, HeldoutConfig
from pat_jax.config.sft import RewardModelConfig, SftConfig
from pat_jax.models.config import ModelConfig
from pat_jax.rl.data.example_reader import ExampleReader, PairReader
from pat_jax.rl.data.examples import Examples
from pat_jax.rl.data.schemas import ExampleSchema, PairSchema
from pat_jax.rl.data.text_reader import TextRows
from pat_jax.run.sft.inputs import find_data, load_tokenizer, padding_of
from pat_jax.run.sft.lessons import ExampleLessons, Lessons, PreferenceLessons, RewardLessons

Reader = ExampleReader | PairReader
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
    train, heldout, note, every = _read(config.eval, data.files, reader, config.seed)
    per_byte = every.tokens_per_byte if isinstance(every, TextRows) else None
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
    train, heldout, note, _ = _read(config.eval, data.files, reader, config.seed)
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
    train, heldout, note, _ = _read(config.eval, data.files, reader, config.seed)
    return PreferenceLessons(train, heldout, note, config.beta, config.label_smoothing)


def _read(
    asked: HeldoutConfig, names: Sequence[str], reader: Reader, seed: int
) -> tuple[Examples, list, str, Sequence]:
    """Returns the first three fields of `Lessons`, and everything that was held out."""
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
    note = f"{read}\neval.data, {evaluated}" if heldout else str(read)
    every = evaluated.heldout
    count = min(asked.num_examples, len(every)) if asked.every else 0
    spread = [every[i * len(every) // count] for i in range(count)]  # evenly over all files
    return Examples(read.train, seed=seed), spread, note, every
