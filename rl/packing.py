"""Which rows of which micro-batches hold which examples. Knows lengths and shapes alone.

A row holds several examples, one behind the other. Everything here runs on the host.
"""

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np

Shape = tuple[int, int]  # rows, length

# What a micro-batch costs beside its tokens (adding its gradients up, gathering split parameters),
# as a share of the largest one's tokens.
PASS_COST = 1 / 32
MOST_SHAPES = 4  # each about half of the next: the smallest is an eighth of the largest
MOST_OF_LONGER = 0.75  # of a bucket's length that a shorter one may have to be worth a program


class Spot(NamedTuple):
    """Where an example begins."""

    micro: int  # of the micro-batches
    row: int
    start: int  # position
    number: int  # of the row's examples, from 1


class Packing(NamedTuple):
    shapes: list[Shape]  # of each micro-batch
    spots: list[Spot]  # of each example


def shapes(buckets: Sequence[int], budget: int, row_multiple: int) -> list[Shape]:
    """Every (rows, length) a micro-batch can have, smallest first: compile these ahead of time.

    The largest has the budget's tokens in rows of the longest bucket. Each other has about half of
    the next larger one's: half of its rows, or as many rows of a shorter bucket where these cannot
    be halved. They hold what is left over when larger ones are full; less than an eighth of the
    largest is not worth a program.

    Args:
      buckets: lengths in tokens, strictly increasing; the last must hold the longest example. There
        are at most as many shapes.
      budget: rows * length in tokens, all devices together; exceeded only where `row_multiple`
        rows are already more.
      row_multiple: the number of shards that the rows are split into.
    """
    if not buckets or buckets[0] < 1 or any(a >= b for a, b in pairwise(buckets)):
        raise ValueError(f"buckets must be positive and strictly increasing; got {list(buckets)}.")
    if row_multiple < 1:
        raise ValueError(f"row_multiple must be at least 1; got {row_multiple}.")
    *shorter, longest = buckets
    rows = max(row_multiple, budget // longest // row_multiple * row_multiple)
    found = [(rows, longest)]
    while len(found) < min(len(buckets), MOST_SHAPES):
        half = rows // 2 // row_multiple * row_multiple
        below = [length for length in shorter if length <= MOST_OF_LONGER * longest]
        if half:
            rows = half
        elif below:
            longest = below[-1]
        else:
            break
        found.append((rows, longest))
    return found[::-1]


def pack_rows(lengths: Sequence[int], micro_shapes: Sequence[Shape]) -> Packing:
    """Every example in one place, with little left empty.

    Full micro-batches of the largest shape come first, with the longest examples that are left, each
    row filled up with the longest that fit. What remains goes into the smallest shape that holds it,
    or into a full smaller one and others, where these have together fewer tokens.

    Args:
      lengths: tokens of each example.
      micro_shapes: from `shapes`.

    Raises:
      ValueError: an example is longer than every row.
    """
    longest = max(lengths, default=0)
    if longest > micro_shapes[-1][1]:
        raise ValueError(
            f"an example of {longest} tokens does not fit the longest bucket, {micro_shapes[-1][1]}. "
            f"Usual cause: buckets made for another max_prompt_length + max_completion_length."
        )
    rest = sorted(range(len(lengths)), key=lambda i: -lengths[i])  # equal ones in their order
    chosen, spots = [], {}
    for shape, members in _micro_batches(rest, lengths, micro_shapes)[1]:
        spots |= {i: spot._replace(micro=len(chosen)) for i, spot in members.items()}
        chosen.append(shape)
    return Packing(chosen, [spots[i] for i in range(len(lengths))])


def single_passes(lengths: Sequence[int], shape: Shape, *, max_examples: int) -> list[list[int]]:
    """Examples in their order, in batches of at most so many that go into one micro-batch each."""
    rest, batches = list(range(len(lengths))), []
    while rest:
        placed = [*_fill(rest, lengths, shape)[0]][:max_examples]
        batches.append(placed)
        rest = sorted(set(rest).difference(placed))
    return batches


Filled = tuple[Shape, dict[int, Spot]]  # a micro-batch and what is in it


def _micro_batches(
    rest: Sequence[int], lengths: Sequence[int], micro_shapes: Sequence[Shape]
) -> tuple[float, list[Filled]]:
    """For examples from the longest down: their cost in tokens, and the micro-batches."""
    full: list[Filled] = []
    each = PASS_COST * np.prod(micro_shapes[-1])
    cost = 0.0
    while rest:
        tries = [(shape, *_fill(rest, lengths, shape)) for shape in micro_shapes]
        whole = next(((shape, spots) for shape, spots, left in tries if not left), None)
        partial = [one for one in tries if one[2] and one[1]]
        if whole is None:
            shape, spots, rest = partial[-1]
            full.append((shape, spots))
            cost += np.prod(shape) + each
            continue
        best = np.prod(whole[0]) + each, [whole]
        smaller = [one for one in partial if np.prod(one[0]) < np.prod(whole[0])]
        if smaller:
            shape, spots, left = smaller[-1]
            later, others = _micro_batches(left, lengths, micro_shapes)
            best = min(
                best, (np.prod(shape) + each + later, [(shape, spots), *others]), key=lambda x: x[0]
            )
        return cost + best[0], full + best[1]
    return cost, full


def _fill(
    rest: Sequence[int], lengths: Sequence[int], shape: Shape
) -> tuple[dict[int, Spot], list[int]]:
    """First fit: each example in the first row that has room for it, and those that found none."""
    rows, length = shape
    used, counts = np.zeros(rows, np.int64), np.zeros(rows, np.int64)
    spots, left = {}, []
    for i in rest:
        row = int(np.argmax(used + lengths[i] <= length))
        if used[row] + lengths[i] > length:
            left.append(i)
            continue
        counts[row] += 1
        spots[i] = Spot(0, row, int(used[row]), int(counts[row]))
        used[row] += lengths[i]
    return spots, left
