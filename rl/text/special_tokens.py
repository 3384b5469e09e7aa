"""A tokenizer's special tokens: which it puts before a text, and which a decoded text leaves out.

Knows tokenizers of transformers.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any


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
