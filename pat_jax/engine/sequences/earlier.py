"""Responses of earlier iterations, by prompt: drafts are copied from them when it comes again.

All on the host, in NumPy. Bounded in tokens, and a function of what was put in alone. Does not know
which policy generated them, nor files.
"""

import zlib
from collections import OrderedDict
from collections.abc import Iterator, Sequence

import numpy as np

Prompt = Sequence[int] | np.ndarray  # its tokens


class EarlierResponses:
    """The newest responses to each prompt, whole. The prompts not met for longest go first.

    A prompt is known by all of its tokens, so that no two are taken for one.

    Args:
      most: tokens in all, those of prompts among them.
      of_prompt: tokens of the responses to one prompt.
      beside: tokens that a response takes beside its own where it is laid out: they count for
        `of_prompt`.
    """

    def __init__(self, most: int, of_prompt: int, beside: int = 0):
        self.most, self.of_prompt, self.beside = most, of_prompt, beside
        self.num_tokens = 0
        self._texts: OrderedDict[bytes, list[np.ndarray]] = OrderedDict()  # met last, comes last

    def put(self, prompt: Prompt, responses: Sequence[np.ndarray]) -> None:
        """Takes the newest responses to a prompt.

        As many of these and of the earlier ones are kept, from the first, as find room; equal ones
        count once.

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
            self.num_tokens -= _tokens(*self._texts.popitem(last=False))

    def of(self, prompt: Prompt) -> Sequence[np.ndarray]:
        """int32[tokens] of each response kept, the best to draft from first."""
        return self._texts.get(_key(prompt), ())

    def __len__(self) -> int:
        """Prompts that have responses here."""
        return len(self._texts)

    @property
    def num_responses(self) -> int:
        return sum(map(len, self._texts.values()))

    def __iter__(self) -> Iterator[tuple[np.ndarray, Sequence[np.ndarray]]]:
        """Prompts, int32[tokens], with responses, in the order that makes another one the same."""
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
        """Those with room, up to the first that has none."""
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
