"""Which rows of which micro-batches hold which examples. Knows lengths and shapes alone.

A row holds several examples, one behind the other. Those that begin alike may share that beginning:
it lies before the first of them once, and what each has of its own follows. Everything here runs on
the host.
"""

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

Shape = tuple[int, int]  # rows, length

# What a micro-batch costs beside its tokens (adding its gradients up, gathering split parameters),
# as a share of the largest one's tokens.
PASS_COST = 1 / 32
MOST_SHAPES = 4  # each about half of the next: the smallest is an eighth of the largest
MOST_OF_LONGER = 0.75  # of a bucket's length that a shorter one may have to be worth a program


class Prefix(NamedTuple):
    """The tokens that an example begins with, as others do."""

    of: int  # equal for the examples that begin with the same
    length: int  # tokens, fewer than each of them has


class Spot(NamedTuple):
    """Where an example begins."""

    micro: int  # of the micro-batches
    row: int
    start: int  # position in the row of its first token that no other one has put there
    number: int  # of the row's examples, from 1
    shared: int = 0  # of its first tokens, how many lie in the row already


class Packing(NamedTuple):
    shapes: list[Shape]  # of each micro-batch
    spots: list[Spot]  # of each example


def shapes(
    buckets: Sequence[int],
    budget: int,
    row_multiple: int,
    most_rows: int | None = None,
    most_shapes: int = MOST_SHAPES,
) -> list[Shape]:
    """Every (rows, length) a micro-batch can have, smallest first: compile these ahead of time.

    The largest has the budget's tokens in rows of the longest bucket, but no more rows than needed.
    Each other has about half of the next larger one's: half of its rows, or as many rows of a
    shorter bucket where these cannot be halved. They hold what is left over when larger ones are
    full; less than an eighth of the largest is not worth a program.

    Args:
      buckets: lengths in tokens, strictly increasing; the last must hold the longest example. There
        are at most as many shapes.
      budget: rows * length in tokens, all devices together; exceeded only where `row_multiple`
        rows are already more.
      row_multiple: the number of shards that the rows are split into.
      most_rows: that are ever needed, as one for each example of a mini-batch; None: not known.
      most_shapes: more than four there never are.
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
    """Every example in one place, with little left empty.

    Full micro-batches of the largest shape come first, each row filled up with what fits. What
    remains goes into the smallest shape that holds it, or into a full smaller one and others, where
    these have together fewer tokens.

    An example goes to the first row that has its prefix and room for the rest of it, else to the
    first with room for all of it. A prefix that is too much for one row is in several. Three ways
    are tried: in the order of lengths, in that of prefixes, longest first, and rows that share
    nothing. The one with the fewest tokens in all is taken.

    Args:
      lengths: tokens of each example.
      micro_shapes: from `shapes`.
      prefixes: of each example; None: nothing is shared.

    Raises:
      ValueError: an example is longer than every row.
    """
    longest = max(lengths, default=0)
    if longest > micro_shapes[-1][1]:
        raise ValueError(
            f"an example of {longest} tokens does not fit the longest bucket, {micro_shapes[-1][1]}. "
            f"Usual cause: buckets made for another max_prompt_length + max_completion_length."
        )
    chosen, spots = [], {}
    for shape, members in min(_ways(lengths, micro_shapes, prefixes), key=lambda way: way[0])[1]:
        spots |= {i: spot._replace(micro=len(chosen)) for i, spot in members.items()}
        chosen.append(shape)
    return Packing(chosen, [spots[i] for i in range(len(lengths))])


def single_passes(lengths: Sequence[int], shape: Shape, *, max_examples: int) -> list[list[int]]:
    """Examples in their order, in batches of at most so many that go into one micro-batch each."""
    apart = _apart(lengths)
    rest, batches = list(range(len(lengths))), []
    while rest:
        placed = sorted(_fill(rest, apart, shape)[0])[:max_examples]
        batches.append(placed)
        rest = sorted(set(rest).difference(placed))
    return batches


Filled = tuple[Shape, dict[int, Spot]]  # a micro-batch and what is in it


class _Example(NamedTuple):
    length: int
    shared: int  # of its tokens, where its prefix lies in the row already
    prefix: int


def _apart(lengths: Sequence[int]) -> list[_Example]:
    """Of examples that share nothing."""
    return [_Example(length, 0, i) for i, length in enumerate(lengths)]


def _ways(
    lengths: Sequence[int], micro_shapes: Sequence[Shape], prefixes: Sequence[Prefix] | None
) -> Iterator[tuple[float, list[Filled]]]:
    """Each with its cost in tokens; that which shares nothing first."""
    by_length = sorted(range(len(lengths)), key=lambda i: -lengths[i])  # equal ones in their order
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
    """For examples in this order: their cost in tokens, and the micro-batches."""
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
            rest, cost = left, cost + np.prod(largest) + each
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
    """First fit: where the examples are, and those that found no row with room."""
    rows, length = shape
    used = [0] * rows  # a list: NumPy is slower at single numbers
    # Of each row, by prefix; and the rows that have a prefix.
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
    """Of a row's examples, those that share a prefix together."""
    spots, start = {}, 0
    for alike in members:
        for i in alike:
            shared = examples[i].shared if i != alike[0] else 0
            spots[i] = Spot(0, row, start, len(spots) + 1, shared)
            start += examples[i].length - shared
    return spots
