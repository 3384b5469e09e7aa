"""Which responses this process scores, where several processes are one run.

Plain values. Imports no jax, and does not know how processes talk.
"""

import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Protocol, TypeVar, runtime_checkable

T = TypeVar("T")


@runtime_checkable
class Shares(Protocol):
    """The processes that score together, each a share of the groups."""

    @property
    def index(self) -> int: ...

    @property
    def count(self) -> int: ...

    def gather(self, name: str, value: T) -> list[T]:
        """What each process gives, in every one."""
        ...


class Alone:
    """One process, which scores everything."""

    index, count = 0, 1

    def gather(self, name: str, value: T) -> list[T]:
        del name
        return [value]


def groups_of(prompts: Sequence[str]) -> Iterator[range]:
    """Runs of equal prompts: the responses that a function may compare, and one process scores."""
    start = 0
    for _, group in itertools.groupby(prompts):
        stop = start + len(list(group))
        yield range(start, stop)
        start = stop


def own_rows(prompts: Sequence[str], shares: Shares) -> set[int]:
    """The responses that this process scores: whole groups, every `shares.count`th."""
    groups = list(groups_of(prompts))
    return {row for group in groups[shares.index :: shares.count] for row in group}


def together(shares: Shares, name: str, own: Mapping[int, T]) -> dict[int, T]:
    """What each process has by response, in one."""
    return {row: value for part in shares.gather(name, own) for row, value in part.items()}
