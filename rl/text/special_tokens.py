"""A tokenizer's special tokens: those that it puts before a text, and those that decoding drops.

Also finds the end-of-sequence tokens in a checkpoint's files. Knows tokenizers of transformers.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pat_jax.common.errors import UserError, shown
from pat_jax.common.json_text import read_json_object

GENERATION_CONFIG = "generation_config.json"
MODEL_CONFIG = "config.json"
_FIELD = "eos_token_id"
_SECTIONS = ("text_config", "decoder", "generator")  # fields with the text model's own config


@dataclass(frozen=True)
class SpecialTokens:
    beginning: tuple[int, ...]  # tokens that the tokenizer puts before every text
    texts: Mapping[int, str]  # texts, by id, of the tokens that decoding drops as special

    @classmethod
    def of(cls, tokenizer: Any) -> "SpecialTokens":
        return cls(_beginning(tokenizer), _texts(tokenizer))

    def begun_once(self, tokens: Sequence[int]) -> list[int]:
        """Returns the tokens; if they begin with `beginning` twice, without the first."""
        count = len(self.beginning)
        is_twice = count and tuple(tokens[: 2 * count]) == 2 * self.beginning
        return list(tokens[count if is_twice else 0 :])


def _beginning(tokenizer: Any) -> tuple[int, ...]:
    """Returns the tokens that the tokenizer puts before a text. If there are none, returns its
    beginning-of-sequence token, or () without one."""
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
    """Returns the end-of-sequence ids of generation_config.json or, without any, of config.json.

    transformers and vLLM use config.json only if the other file is missing. If the other file lacks
    the field, their responses do not end.
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
    """Yields the objects of a file that may name the ids, outermost first, each after its path."""
    if not path.exists():
        return
    content = read_json_object(path)
    yield "", content
    for name in _SECTIONS:
        if isinstance(content.get(name), dict):
            yield f"{name}.", content[name]
