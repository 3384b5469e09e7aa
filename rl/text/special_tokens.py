"""A tokenizer's special tokens: which it puts before a text, and which a decoded text leaves out.

Also end-of-sequence tokens that files of a checkpoint name. Knows tokenizers of transformers.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pat_jax.common.errors import UserError, shown
from pat_jax.common.json_text import JsonError, parse_json

GENERATION_CONFIG, MODEL_CONFIG = "generation_config.json", "config.json"
_FIELD = "eos_token_id"
_SECTIONS = ("text_config", "decoder", "generator")  # of the text's model, where there are several


@dataclass(frozen=True)
class SpecialTokens:
    beginning: tuple[int, ...]  # that stand before every text
    texts: Mapping[int, str]  # how those are written that a text without special tokens has not

    @classmethod
    def of(cls, tokenizer: Any) -> "SpecialTokens":
        return cls(_beginning(tokenizer), _texts(tokenizer))

    def begun_once(self, tokens: Sequence[int]) -> list[int]:
        """Without the second one of two beginnings, where the text has had one already."""
        count = len(self.beginning)
        is_twice = count and tuple(tokens[: 2 * count]) == 2 * self.beginning
        return list(tokens[count if is_twice else 0 :])


def _beginning(tokenizer: Any) -> tuple[int, ...]:
    """As the tokenizer itself begins a text; where it does not, its token for it, if it has one."""
    begun, bare = (tokenizer.encode("a", add_special_tokens=more) for more in (True, False))
    for count in range(1, len(begun) - len(bare) + 1):
        if bare and begun[count : count + len(bare)] == bare:
            return tuple(begun[:count])
    token = tokenizer.bos_token_id
    return () if token is None else (token,)


def _texts(tokenizer: Any) -> dict[int, str]:
    added = tokenizer.added_tokens_decoder
    marked = {token for token, how in added.items() if how.special}
    texts = {
        token: tokenizer.convert_ids_to_tokens(token)
        for token in sorted(marked | set(tokenizer.all_special_ids))
    }
    return {
        token: text
        for token, text in texts.items()
        if text and not tokenizer.decode([token], skip_special_tokens=True)
    }


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
