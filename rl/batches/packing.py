"""Decides which rows of which micro-batches hold which examples. Knows only lengths and shapes.

A row holds several examples in turn. Examples with a common prefix may share it: the row then holds
the prefix once, followed by each example's own tokens. Everything here runs on the host.
"""

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

Shape = tuple[int, int]  # rows, length

# Fixed cost of a micro-batch (adding up its gradients, gathering split parameters), as a share of
# the largest one's tokens.
PASS_COST = 1 / 32
# The share of real tokens from which on micro-batches count as full. It was the best of 0.4 to 0.8
# in replays of PPO on 8 to 32 H100 that compute gradients during the rollout.
FULL = 0.8
MOST_SHAPES = 4  # each has about half the tokens of the next, the smallest an eighth of the largest
MOST_OF_LONGER = 0.75  # largest ratio of the row lengths of two shapes, if they differ


class Prefix(NamedTuple):
    """The first tokens of an example, which other examples share."""

    of: int  # the prefix's number, equal for the examples that share it
    length: int  # number of tokens of the prefix; each of these examples has more


class Spot(NamedTuple):
    """The place where an example begins."""

    micro: int  # index of the micro-batch
    row: int
    start: int  # position in the row of the example's first own token (after a shared prefix)
    number: int  # the example's number among those of the row, from 1
    shared: int = 0  # number of tokens of the prefix that an earlier example put into the row


class Packing(NamedTuple):
    shapes: list[Shape]  # shape of each micro-batch
    spots: list[Spot]  # spot of each example


def shapes(
    buckets: Sequence[int],
    budget: int,
    row_multiple: int,
    most_rows: int | None = None,
    most_shapes: int = MOST_SHAPES,
) -> list[Shape]:
    """Returns every shape (rows, length) that a micro-batch can have, smallest first.

    The largest has the budget's tokens in rows of the longest bucket, but no more rows than needed.
    Each other has about half the tokens of the next larger one: half of its rows or, if these
    cannot be halved, as many rows of a shorter bucket. Smaller shapes hold the examples left over
    by larger ones. A shape below an eighth of the largest is not worth a program.

    Args:
      buckets: row lengths in tokens, strictly increasing; the last must hold the longest example.
        There are at most as many shapes as buckets.
      budget: most tokens (rows * length) over all devices; exceeded only if `row_multiple` rows
        already exceed it.
      row_multiple: number of data-parallel parts that the rows are divided over.
      most_rows: most rows ever needed, such as one for each example of a mini-batch, if known.
      most_shapes: most shapes to return; there are never more than MOST_SHAPES.
    """
    *shorter, longest = buckets
    rows = budget // longest // row_multiple
    if most_rows is not None:
        rows = min(rows, -(-most_rows // row_multiple))
    rows = row_multiple * max(1, rows)
    found = [(rows, longest)]
    while len(found) < min(len(buckets), most_shapes, MOST_SHAPES):
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


def pack_rows(
    lengths: Sequence[int], micro_shapes: Sequence[Shape], prefixes: Sequence[Prefix] | None = None
) -> Packing:
    """Places every example once, with little padding. Raises ValueError if an example is longer
    than every row.

    Full micro-batches of the largest shape come first, each row filled with the examples that fit.
    The remaining examples go into one micro-batch of the smallest shape that holds them. They go
    into several smaller ones instead if these cost less in tokens, with `PASS_COST` for each.

    An example goes to the first row that has its prefix and room for its own tokens, else to the
    first row with room for all of its tokens. So several rows may hold the same prefix. Three ways
    are tried: sharing with examples ordered by length, sharing with examples ordered by prefix
    (longest first), and not sharing. The way with the fewest tokens in total wins.

    Args:
      lengths: number of tokens of each example.
      micro_shapes: shapes from `shapes`.
      prefixes: prefix of each example, or None if examples share nothing.
    """
    longest = max(lengths, default=0)
    if longest > micro_shapes[-1][1]:
        raise ValueError(
            f"an example of {longest} tokens does not fit the longest bucket, {micro_shapes[-1][1]}. "
            f"Usual cause: buckets made for another max_prompt_length + max_completion_length."
        )
    chosen = []
    spots = {}
    for shape, members in min(_ways(lengths, micro_shapes, prefixes), key=lambda way: way[0])[1]:
        spots |= {i: spot._replace(micro=len(chosen)) for i, spot in members.items()}
        chosen.append(shape)
    return Packing(chosen, [spots[i] for i in range(len(lengths))])


def fills(lengths: Sequence[int], micro_shapes: Sequence[Shape]) -> bool:
    """Whether these examples can be computed at once, without waiting for more of them: if their
    micro-batches have little padding, or if one of the largest shape is full. The arguments are
    those of `pack_rows`."""
    if sum(lengths) < FULL * math.prod(micro_shapes[0]):
        return False
    chosen = pack_rows(lengths, micro_shapes).shapes
    has_full = len(chosen) > 1 and chosen[0] == micro_shapes[-1]
    return has_full or sum(lengths) >= FULL * sum(map(math.prod, chosen))


def single_passes(lengths: Sequence[int], shape: Shape, *, max_examples: int) -> list[list[int]]:
    """Returns batches of examples, roughly in order, that fit one micro-batch of `shape` each. A
    batch is a list of at most `max_examples` indices."""
    apart = _apart(lengths)
    rest = list(range(len(lengths)))
    batches = []
    while rest:
        placed = sorted(_fill(rest, apart, shape)[0])[:max_examples]
        batches.append(placed)
        rest = sorted(set(rest).difference(placed))
    return batches


Filled = tuple[Shape, dict[int, Spot]]  # a micro-batch, and the spot of each of its examples


class _Example(NamedTuple):
    length: int
    shared: int  # number of tokens that it shares if its prefix is in the row already
    prefix: int


def _apart(lengths: Sequence[int]) -> list[_Example]:
    return [_Example(length, 0, i) for i, length in enumerate(lengths)]


def _ways(
    lengths: Sequence[int], micro_shapes: Sequence[Shape], prefixes: Sequence[Prefix] | None
) -> Iterator[tuple[float, list[Filled]]]:
    """Yields the cost in tokens and the result of each way to pack, first without sharing."""
    by_length = sorted(range(len(lengths)), key=lambda i: -lengths[i])  # stable for equal lengths
    yield _micro_batches(by_length, _apart(lengths), micro_shapes)
    if prefixes is None:
        return
    sharing = [
        _Example(length, shared, of) for length, (of, shared) in zip(lengths, prefixes, strict=True)
    ]
    totals = Counter()
    for example in sharing:
        totals[example.prefix] += example.length - example.shared
    by_prefix = sorted(by_length, key=lambda i: (-totals[sharing[i].prefix], sharing[i].prefix))
    for order in (by_length, by_prefix):
        yield _micro_batches(order, sharing, micro_shapes)


def _micro_batches(
    rest: Sequence[int], examples: Sequence[_Example], micro_shapes: Sequence[Shape]
) -> tuple[float, list[Filled]]:
    """Packs the examples with indices `rest` in order. Returns the cost in tokens, and the
    micro-batches."""
    full: list[Filled] = []
    each = PASS_COST * np.prod(micro_shapes[-1])
    cost = 0.0
    *smaller, largest = micro_shapes
    most = max((math.prod(shape) for shape in smaller), default=0)
    while rest:
        placed, left = _fill(rest, examples, largest)
        least = sum(examples[i].length - examples[i].shared for i in rest)
        if left and least > most:  # too much for any of them
            full.append((largest, placed))
            rest = left
            cost = cost + np.prod(largest) + each
            continue
        tries = [(shape, *_fill(rest, examples, shape)) for shape in smaller]
        tries.append((largest, placed, left))
        whole = next(((shape, spots) for shape, spots, left in tries if not left), None)
        partial = [one for one in tries if one[2] and one[1]]
        if whole is None:
            shape, spots, rest = partial[-1]
            full.append((shape, spots))
            cost += np.prod(shape) + each
            continue
        best = np.prod(whole[0]) + each, [whole]
        below = [one for one in partial if np.prod(one[0]) < np.prod(whole[0])]
        if below:
            shape, spots, left = below[-1]
            later, others = _micro_batches(left, examples, micro_shapes)
            best = min(
                best, (np.prod(shape) + each + later, [(shape, spots), *others]), key=lambda x: x[0]
            )
        return cost + best[0], full + best[1]
    return cost, full


def _fill(
    rest: Sequence[int], examples: Sequence[_Example], shape: Shape
) -> tuple[dict[int, Spot], list[int]]:
    """Packs first-fit. Returns the examples' spots, and the indices of those that fit no row."""
    rows, length = shape
    used = [0] * rows  # a list, since NumPy is slower with single numbers
    # `members`: each row's examples by prefix; `having`: the rows that have a prefix.
    members: list[dict[int, list[int]]] = [{} for _ in range(rows)]
    having: dict[int, list[int]] = {}
    left = []
    for i in rest:
        whole, shared, prefix = examples[i]
        known = having.setdefault(prefix, [])
        row = next((row for row in known if used[row] + whole - shared <= length), None)
        if row is not None:
            used[row] += whole - shared
        else:
            most = length - whole
            row = next((row for row, tokens in enumerate(used) if tokens <= most), None)
            if row is None:
                left.append(i)
                continue
            used[row] += whole
            known.append(row)
        members[row].setdefault(prefix, []).append(i)
    spots = {}
    for row, by_prefix in enumerate(members):
        spots |= _spots(row, by_prefix.values(), examples)
    return spots, left


def _spots(
    row: int, members: Iterable[Sequence[int]], examples: Sequence[_Example]
) -> dict[int, Spot]:
    """Returns the spots of a row's examples; those that share a prefix are together."""
    spots = {}
    start = 0
    for alike in members:
        for i in alike:
            shared = examples[i].shared if i != alike[0] else 0
            spots[i] = Spot(0, row, start, len(spots) + 1, shared)
            start += examples[i].length - shared
    return spots
