"""Responses of earlier iterations by prompt; drafts are copied from them when a prompt comes again.

All on the host, in NumPy. The number of tokens is bounded. The content depends on nothing but the
calls of `put`. Does not know which policy generated them, nor files.
"""

import zlib
from collections import OrderedDict
from collections.abc import Iterator, Sequence

import numpy as np

Prompt = Sequence[int] | np.ndarray  # the tokens of a prompt


class EarlierResponses:
    """Keeps the newest whole responses to each prompt. The least recently put prompts are dropped.

    A prompt is identified by all of its tokens, so that two prompts are never confused.

    Args:
      most: the most tokens of all prompts and responses together.
      of_prompt: the most tokens of the responses to one prompt.
      beside: extra columns that a response takes in a row's text (`texts.BESIDE`); they count, too.
    """

    def __init__(self, most: int, of_prompt: int, beside: int = 0):
        self.most = most
        self.of_prompt = of_prompt
        self.beside = beside
        self.num_tokens = 0
        self._texts: OrderedDict[bytes, list[np.ndarray]] = OrderedDict()  # newest put is last

    def put(self, prompt: Prompt, responses: Sequence[np.ndarray]) -> None:
        """Adds the newest responses to a prompt.

        The new responses, then the older ones, are kept in order, up to the first that would exceed
        `of_prompt`. Equal responses are kept once.

        Args:
          responses: int[tokens] each, the best to draft from first.
        """
        key = _key(prompt)
        before = self._texts.pop(key, [])
        self.num_tokens -= _tokens(key, before) if before else 0
        kept = self._fitting([*responses, *before])
        if kept:
            self._texts[key] = kept
            self.num_tokens += _tokens(key, kept)
        while self.num_tokens > self.most:
            oldest, texts = self._texts.popitem(last=False)
            self.num_tokens -= _tokens(oldest, texts)

    def of(self, prompt: Prompt) -> Sequence[np.ndarray]:
        """Returns a prompt's kept responses, int32[tokens] each, the best to draft from first."""
        return self._texts.get(_key(prompt), ())

    def __len__(self) -> int:
        """Returns the number of prompts with responses."""
        return len(self._texts)

    @property
    def num_responses(self) -> int:
        return sum(map(len, self._texts.values()))

    def __iter__(self) -> Iterator[tuple[np.ndarray, Sequence[np.ndarray]]]:
        """Yields each prompt, int32[tokens], with its responses; `put` in this order copies all."""
        for key, texts in self._texts.items():
            yield np.frombuffer(key, np.int32), texts

    @property
    def checksum(self) -> int:
        """A checksum of everything that drafts may come from."""
        crc = 0
        for key, texts in self._texts.items():
            for part in (key, *(text.tobytes() for text in texts)):
                crc = zlib.crc32(part, zlib.crc32(len(part).to_bytes(8, "little"), crc))
        return crc

    def _fitting(self, texts: Sequence[np.ndarray]) -> list[np.ndarray]:
        """Texts up to the first that would exceed `of_prompt`, without empty and repeated ones."""
        kept: dict[bytes, np.ndarray] = {}
        room = self.of_prompt
        for text in texts:
            if not len(text) or (content := _key(text)) in kept:
                continue
            room -= len(text) + self.beside
            if room < 0:
                break
            kept[content] = np.frombuffer(content, np.int32)
        return list(kept.values())


def _key(tokens: Prompt) -> bytes:
    return np.asarray(tokens, np.int32).tobytes()


def _tokens(key: bytes, texts: Sequence[np.ndarray]) -> int:
    return len(key) // np.dtype(np.int32).itemsize + sum(map(len, texts))
