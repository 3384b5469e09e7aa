"""Work before a burst: tokens to prefill, packed into calls, and pages to copy or move.

Host accounts in NumPy. The cache manager decides which sequences and which pages.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from pat_jax.engine.sequences.sequence_table import NO_SEQUENCE, NO_TOKEN


class Copies(NamedTuple):
    """Pages to copy within their replica after the prefill."""

    replica: np.ndarray  # int32[copies]
    source: np.ndarray  # int32[copies], page
    target: np.ndarray  # int32[copies], page


class PageMoves(NamedTuple):
    """Moves of pages, int[moves] each; in a switch one page may move to several replicas."""

    old_replica: np.ndarray
    old_page: np.ndarray
    new_replica: np.ndarray
    new_page: np.ndarray

    @classmethod
    def joined(cls, moves: Sequence["PageMoves"]) -> "PageMoves":
        none = np.zeros((4, 0), np.int64)
        return cls(*map(np.concatenate, zip(none, *moves, strict=True)))

    def part(self, which: np.ndarray) -> "PageMoves":
        """Returns some of the moves, selected by a mask or indices."""
        return PageMoves(*(x[which] for x in self))


@dataclass(frozen=True)
class MovedBytes:
    """The bytes that a move sent and held, for weights and KV cache together."""

    total: int = 0  # sent between devices, over all devices, empty slots of buffers included
    least: int = 0  # the least that any program could send for the same move
    extra: int = 0  # the most that one device held in addition to what it held before


class Spans(NamedTuple):
    """Ranges of tokens to prefill, at most one for each sequence."""

    sequence: np.ndarray  # int[spans]
    replica: np.ndarray  # int[spans], replica of each sequence
    start: np.ndarray  # int[spans], position of the first token: a multiple of the page size
    stop: np.ndarray  # int[spans], position after the last token


class PrefillWork(NamedTuple):
    """The work before the next burst: prefill of all spans, then the copies."""

    spans: Spans
    copies: Copies


class PrefillCall(NamedTuple):
    """One prefill call: in each replica, blocks of one page of tokens, of any of its sequences."""

    sequence: np.ndarray  # int32[replicas, blocks]; NO_SEQUENCE in blocks left empty
    start: np.ndarray  # int32[replicas, blocks], position of each block's first token
    length: np.ndarray  # int32[replicas, blocks], tokens of each block; 0 in blocks left empty

    @property
    def context(self) -> int:
        """The most tokens that one of the call's sequences has in the cache after it."""
        return int((self.start + self.length).max())

    def tokens(self, known: np.ndarray, page_size: int) -> np.ndarray:
        """Returns the blocks' tokens, int32[replicas * blocks, page_size], filled with NO_TOKEN.

        Args:
          known: int[sequences, tokens], the tokens of each sequence.
        """
        blocks = np.full((self.sequence.size, page_size), NO_TOKEN, np.int32)
        for block, i, at in zip(blocks, *self.places(), strict=True):
            block[: at.stop - at.start] = known[i, at]
        return blocks

    def places(self) -> tuple[np.ndarray, list[slice]]:
        """Returns the sequence of each block, and the positions of the block's tokens."""
        ends = self.start + self.length
        pairs = zip(self.start.reshape(-1).tolist(), ends.reshape(-1).tolist(), strict=True)
        return self.sequence.reshape(-1), [slice(start, end) for start, end in pairs]


def prefill_calls(
    spans: Spans, *, num_replicas: int, sizes: tuple[int, int], page_size: int
) -> list[PrefillCall]:
    """Packs the pages of all spans into calls of a few fixed sizes.

    Lower positions come first. So most calls have short contexts. And no page is computed in an
    earlier call than one that it attends to, whether of its own sequence or shared.

    Args:
      sizes: blocks (pages) per replica of a large and of a small call. Small calls take the rest
        after large ones, if together they have fewer blocks than another large call.
    """
    counts = -(-(spans.stop - spans.start) // page_size)
    of = np.repeat(np.arange(len(counts)), counts)  # the span of each block
    turn = np.arange(len(of)) - np.repeat(np.cumsum(counts) - counts, counts)
    start = spans.start[of] + turn * page_size
    order = np.lexsort((start, spans.replica[of]))
    of, start = of[order], start[order]
    replica = spans.replica[of]
    place = np.arange(len(of)) - np.searchsorted(replica, np.arange(num_replicas))[replica]
    large, small = sizes
    blocks = _call_blocks(int(place.max(initial=-1) + 1), large, small)
    packed = np.zeros((3, num_replicas, sum(blocks)), np.int32)
    packed[0] = NO_SEQUENCE
    packed[:, replica, place] = (
        spans.sequence[of],
        start,
        np.minimum(spans.stop[of] - start, page_size),
    )
    calls = np.split(packed, np.cumsum(blocks)[:-1], axis=2) if blocks else []
    return [PrefillCall(sequence, start, length) for sequence, start, length in calls]


def _call_blocks(most: int, large: int, small: int) -> list[int]:
    """The size of each call if the replica with most blocks has `most` of them."""
    num_large, left = divmod(most, large)
    num_small = -(-left // small)
    if num_small * small >= large:
        return [large] * (num_large + 1)
    return [large] * num_large + [small] * num_small
