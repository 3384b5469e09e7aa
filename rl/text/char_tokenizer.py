"""The tokenizer of the built-in task: characters. Reads no file."""

import zlib
from collections.abc import Mapping, Sequence
from typing import Any

from pat_jax.common.errors import UserError
from pat_jax.rl.text.chat_template import ChatTemplateError
from pat_jax.rl.text.tokenizer import NO_TEMPLATE, PromptText, flatten_messages


class CharTokenizer:
    """Each character of an alphabet is a token; 0 is padding and 1 is the end of sequence."""

    eos_ids = (1,)
    _NUM_SPECIAL = 2

    def __init__(self, alphabet: str):
        self.alphabet = alphabet
        self._ids = {char: index + self._NUM_SPECIAL for index, char in enumerate(alphabet)}

    @property
    def vocab_size(self) -> int:
        return len(self.alphabet) + self._NUM_SPECIAL

    @property
    def checksum(self) -> int:
        return zlib.crc32(self.alphabet.encode())

    def encode(self, text: str) -> list[int]:
        unknown = sorted(set(text) - self._ids.keys())
        if unknown:
            raise UserError(
                f"text {text[:40]!r} has the character {unknown[0]!r}: this tokenizer knows only "
                f"{self.alphabet!r}; use a model directory with its own tokenizer."
            )
        return [self._ids[char] for char in text]

    def decode(self, tokens: Sequence[int]) -> str:
        return "".join(
            self.alphabet[token - self._NUM_SPECIAL]
            for token in tokens
            if token >= self._NUM_SPECIAL
        )

    def encode_prompt(
        self, prompt: PromptText, variables: Mapping[str, Any] | None = None
    ) -> list[int]:
        if variables:
            raise ChatTemplateError(f"there is no chat template {NO_TEMPLATE}")
        return self.encode(flatten_messages(prompt))
