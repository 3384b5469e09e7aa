"""The inputs of a run that learns from files: the model's shape, its tokenizer, the names of files.

Knows directories and built-in shapes. Does not know what is in the files.
"""

import glob
import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Literal

from pat_jax.common.errors import UserError
from pat_jax.common.hub import is_checkpoint, local_checkpoint
from pat_jax.common.json_text import read_json_object
from pat_jax.common.patterns import matches
from pat_jax.config.shared import ChatOptions
from pat_jax.engine.sizing.draft_choice import checkpoint_shape
from pat_jax.models.checkpoints.hf_config import CONFIG_FILE
from pat_jax.models.config import ModelConfig
from pat_jax.models.presets import PRESETS, preset
from pat_jax.rl.text.tokenizer import (
    BYTE_TOKENIZER,
    NUM_BYTE_TOKENS,
    Chat,
    HuggingFaceTokenizer,
    check_vocabulary,
    has_tokenizer,
)
from pat_jax.run.start.task import find_files

_MOST_BYTE_TOKENS = 512  # embedding rows of a model of bytes: a vocabulary may be padded


def shape_of_model(name: str, head: Literal["vocab", "scalar"] = "vocab") -> ModelConfig:
    """Returns a checkpoint's shape, or a built-in one, whose tokens are bytes and an end token.
    Raises UserError if the name is neither.

    Args:
      head: the head that the model is to have.
    """
    if (model := checkpoint_shape(name, "model", head)) is not None:
        return model
    if name not in PRESETS:
        raise UserError(
            f"option --model is {name!r}: expected a Hugging Face checkpoint directory, with config.json, "
            f"weights and tokenizer, or a built-in shape, one of {', '.join(PRESETS)}; give one."
        )
    return replace(preset(name, vocab_size=NUM_BYTE_TOKENS), head=head)


def tokenizer_dir(name: str, model: ModelConfig) -> Path:
    """Returns the directory of the model's tokenizer, or of the byte tokenizer if it has none.
    Raises UserError if the model has no tokenizer, and its vocabulary is not that of bytes."""
    if not is_checkpoint(name):
        return BYTE_TOKENIZER
    folder = Path(local_checkpoint(name, weights=False))
    if has_tokenizer(folder):
        return folder
    if not NUM_BYTE_TOKENS <= model.vocab_size <= _MOST_BYTE_TOKENS:
        raise UserError(
            f"{folder} has no tokenizer files, and vocab_size in its config.json is {model.vocab_size:,}: "
            f"expected tokenizer.json, or {NUM_BYTE_TOKENS} to {_MOST_BYTE_TOKENS} tokens to train on bytes; "
            "copy the file from the model's release."
        )
    return BYTE_TOKENIZER


def load_tokenizer(name: str, options: ChatOptions, model: ModelConfig) -> HuggingFaceTokenizer:
    """Loads the tokenizer of the model `name`. Raises UserError if one of its token ids has no row
    in the model's embedding."""
    chat = Chat(options.system_prompt, options.template_variables)
    tokenizer = HuggingFaceTokenizer(tokenizer_dir(name, model), chat)
    check_vocabulary(tokenizer, model.vocab_size, source=name)
    return tokenizer


def padding_of(tokenizer: HuggingFaceTokenizer) -> tuple[int, str]:
    """Returns the token that pads the texts of a trained reward model, and its text, if it is a
    special one: that of config.json, else the tokenizer's, else the end-of-sequence token, as in
    TRL. The score is read at the last token that is another one."""
    path = tokenizer.directory / CONFIG_FILE
    texts = tokenizer.special.texts
    named = read_json_object(path).get("pad_token_id") if path.is_file() else None
    pad_id = named if isinstance(named, int) and named in texts else tokenizer.pad_id
    return pad_id, texts.get(pad_id, "")


def find_data(option: str, names: Sequence[str], *, split: str = "train") -> list[Path]:
    """Returns the files that `names` stand for, as `find_files` does. A folder stands for all files
    in it and below, except hidden ones. Raises UserError if a name stands for no file."""
    found = list[Path]()
    for path in find_files(option, names, otherwise=" or folder", split=split):
        found += _inside(path, option) if path.is_dir() else [path]
    return list(dict.fromkeys(found))


def _inside(folder: Path, option: str) -> list[Path]:
    names = matches(f"{glob.escape(str(folder))}/**", option)
    if not (files := [Path(name) for name in names if os.path.isfile(name)]):
        raise UserError(
            f"option --{option} names the folder {folder}, which has no files: expected text files, or "
            ".json, .jsonl or .parquet files of examples, in it or below; check the path."
        )
    return files
