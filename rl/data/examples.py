"""Examples of supervised fine-tuning and preference pairs, as tokens.

Also their order in epochs, and how they are packed, with marks on the tokens that a loss reads.
"""

import zlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property, reduce
from typing import Generic, Literal, TypeVar

import numpy as np
from jaxtyping import Bool, Int

from pat_jax.rl.batches.packing import Shape, pack_rows
from pat_jax.rl.batches.train_batch import Place, TrainBatch, empty_micro_batch


@dataclass(frozen=True)
class Example:
    tokens: Int[np.ndarray, " length"]
    in_loss: Bool[np.ndarray, " length"]  # False for the first token, which nothing predicts
    # Position of each token in its text, from 0; a token sees only its own text. None if the
    # example is one text.
    places: Int[np.ndarray, " length"] | None = None

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def positions(self) -> Int[np.ndarray, " length"]:
        return np.arange(len(self)) if self.places is None else self.places

    def checksum(self, found: int = 0) -> int:
        """Returns the CRC-32 of tokens and `in_loss`, continued from the CRC-32 `found`."""
        return zlib.crc32(self.in_loss.tobytes(), zlib.crc32(self.tokens.tobytes(), found))


@dataclass(frozen=True)
class Pair:
    """Two texts that begin alike, of which one is preferred.

    `in_loss` marks the tokens that a loss reads: the text's last token for a reward model, or the
    response's tokens for a policy.
    """

    chosen: Example
    rejected: Example
    margin: float = 0.0  # by how much the chosen text's reward should exceed the rejected one's
    subset: str = ""  # name of the benchmark's subset, or ""

    def __len__(self) -> int:
        """The number of tokens of both texts together."""
        return len(self.chosen) + len(self.rejected)

    def checksum(self, found: int = 0) -> int:
        """Returns the CRC-32 of tokens, `in_loss` and margin, continued from the CRC-32 `found`."""
        of_both = self.rejected.checksum(self.chosen.checksum(found))
        return zlib.crc32(np.float64(self.margin).tobytes(), of_both) if self.margin else of_both


Each = TypeVar("Each", bound=Example | Pair)


class Examples(Generic[Each]):
    """A fixed set of examples, or of pairs. Every epoch has each of them once, in a new random
    order."""

    def __init__(self, examples: Sequence[Each], *, seed: int):
        self._examples = examples
        self._seed = seed

    def __len__(self) -> int:
        return len(self._examples)

    def __getitem__(self, index: int) -> Each:
        return self._examples[index]

    def draw(self, position: int, size: int) -> list[Each]:
        """Returns the next `size` examples after `position` examples have been drawn.

        This is a pure function. The last batch of an epoch may be smaller: no batch reaches into
        the next epoch.
        """
        epoch, start = divmod(position, len(self))
        order = np.random.default_rng((self._seed, epoch)).permutation(len(self))
        return [self._examples[index] for index in order[start : start + size].tolist()]

    @cached_property
    def checksum(self) -> int:
        """CRC-32 of the examples' tokens and of the marks which are learned, in order."""
        return reduce(lambda found, each: each.checksum(found), self._examples, 0)

    def batches_per_epoch(self, size: int) -> int:
        return -(-len(self) // size)


def pack_texts(
    sets: Sequence[Sequence[Example]],
    micro_shapes: Sequence[Shape],
    *,
    at: Literal["token", "target"],
    weigh: Callable[[Example], float],
) -> TrainBatch:
    """Returns one mini-batch without columns. It has a `Place` for each text in turn, from the
    text's first to its last token in the loss. Raises ValueError if a set is longer than every row.

    Args:
      sets: sets of texts, equally many each; a set's texts follow each other in one row.
      micro_shapes: micro-batch shapes from `packing.shapes`.
      at: where the model's output for a token in the loss is read. "token": at its own position, as
        for a reward model. "target": at the position before, which predicts the token.
      weigh: function that returns the weight of each token in the loss of a text.
    """
    sizes = [sum(map(len, each)) for each in sets]
    packing = pack_rows(sizes, micro_shapes)
    micro_batches = [empty_micro_batch(shape, ()) for shape in packing.shapes]
    before = int(at == "target")
    places = []
    for each, spot in zip(sets, packing.spots, strict=True):
        micro = micro_batches[spot.micro]
        row = spot.row
        start = spot.start
        for i, text in enumerate(each):
            whole = slice(start, start + len(text))
            micro.tokens[row, whole] = text.tokens
            micro.positions[row, whole] = text.positions
            # No position predicts the first token of a text.
            read = start + np.flatnonzero(text.in_loss[before:])
            micro.responses[row, read] = len(each) * (spot.number - 1) + i + 1
            micro.weights[row, read] = weigh(text)
            first, last = (read[0], read[-1]) if len(read) else (start, start - 1)
            places.append(Place(0, spot.micro, row, slice(int(first), int(last) + 1), 0))
            start += len(text)
    slots = sum(micro.tokens.size for micro in micro_batches)
    return TrainBatch([micro_batches], sum(sizes) / max(1, slots), places)


def to_scored_batch(
    texts: Iterable[Int[np.ndarray, " _"]], micro_shapes: Sequence[Shape]
) -> TrainBatch:
    """Returns one mini-batch of texts, at least one token each, that a scalar head scores at their
    last token. `TrainBatch.by_response` returns the scores."""
    whole = [[Example(tokens, np.arange(len(tokens)) == len(tokens) - 1)] for tokens in texts]
    return pack_texts(whole, micro_shapes, at="token", weigh=lambda _: 0.0)
