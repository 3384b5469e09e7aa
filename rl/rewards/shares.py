"""The processes of a run, each of which scores a share of the groups of responses."""

import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Protocol, TypeVar, runtime_checkable

T = TypeVar("T")


@runtime_checkable
class Shares(Protocol):
    """The processes of a run, each of which scores a share of the groups."""

    @property
    def index(self) -> int: ...

    @property
    def count(self) -> int: ...

    def gather(self, name: str, value: T) -> list[T]:
        """Returns, in every process, the list of the `value` of each process."""
        ...


class Alone:
    """A single process, which scores everything."""

    index = 0
    count = 1

    def gather(self, name: str, value: T) -> list[T]:
        del name
        return [value]


def groups_of(prompts: Sequence[str]) -> Iterator[range]:
    """Yields the index range of each group: consecutive equal prompts. One process scores a group,
    since a function may compare its responses."""
    start = 0
    for _, group in itertools.groupby(prompts):
        stop = start + len(list(group))
        yield range(start, stop)
        start = stop


def own_rows(prompts: Sequence[str], shares: Shares) -> set[int]:
    """Returns the indices of the responses that this process scores: those of every n-th group, for
    n processes."""
    groups = list(groups_of(prompts))
    return {row for group in groups[shares.index :: shares.count] for row in group}


def together(shares: Shares, name: str, own: Mapping[int, T]) -> dict[int, T]:
    """Returns, in every process, the values of all processes in one dict by response index."""
    return {row: value for part in shares.gather(name, own) for row, value in part.items()}
