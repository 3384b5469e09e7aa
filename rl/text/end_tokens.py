"""End-of-sequence tokens that the files of a checkpoint name beside its tokenizer's own.

Knows the two files. Does not know a vocabulary.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from pat_jax.common.errors import UserError, shown
from pat_jax.common.json_text import JsonError, parse_json

GENERATION_CONFIG, MODEL_CONFIG = "generation_config.json", "config.json"
_FIELD = "eos_token_id"
_SECTIONS = ("text_config", "decoder", "generator")  # of the text's model, where there are several


def named_eos_ids(directory: Path) -> tuple[int, ...]:
    """Those of generation_config.json; where it names none, those of config.json.

    transformers and vLLM take config.json where the other file is missing. Where it is there
    without the field, their responses would not end at all.

    Raises:
      UserError: a file does not hold a JSON object, or its field does not hold integers.
    """
    for path in (directory / GENERATION_CONFIG, directory / MODEL_CONFIG):
        for where, fields in _sections(path):
            eos = fields.get(_FIELD)
            ids = eos if isinstance(eos, list) else [] if eos is None else [eos]
            if not all(type(token) is int for token in ids):
                raise UserError(
                    f"{path}, field {where}{_FIELD}, is {shown(eos)}: expected an integer or a list of "
                    "integers; correct it."
                )
            if ids:
                return tuple(dict.fromkeys(ids))
    return ()


def _sections(path: Path) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """The objects of a file that may name them, the outermost first, each with its place."""
    if not path.exists():
        return
    try:
        content = parse_json(path.read_text(encoding="utf-8")) if path.is_file() else "no file"
    except (JsonError, UnicodeDecodeError, OSError) as error:
        content = (str(error).splitlines() or [type(error).__name__])[0]
    if not isinstance(content, dict):
        raise UserError(
            f"{path} is not a JSON object ({content!s:.100}): expected one with {_FIELD}; repair or "
            "remove the file."
        )
    yield "", content
    for name in _SECTIONS:
        if isinstance(content.get(name), dict):
            yield f"{name}.", content[name]
