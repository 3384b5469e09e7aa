"""Progress bars: on a terminal, under the cell of a notebook, and nowhere else.

tqdm is imported when the first one is shown.
"""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TextIO

if TYPE_CHECKING:
    from tqdm import tqdm


def is_cell(stream: TextIO) -> bool:
    """Whether what is written there appears under a cell of a notebook."""
    return type(stream).__module__.startswith("ipykernel")


def bar(*iterable: Any, **options: Any) -> "tqdm":
    """As `tqdm(*iterable, **options)`."""
    from tqdm.auto import tqdm

    shown = {"disable": None, "dynamic_ncols": True} | options
    if is_cell(sys.stdout):
        shown["disable"] = False
    return tqdm(*iterable, **shown)


@contextmanager
def counting(what: str, **options: Any) -> Iterator[Callable[[int, int], None]]:
    """A bar of programs; yields what it is told by: how many are done, and of how many."""
    with bar(total=0, unit="program", desc=what, **options) as shown:

        def show(done: int, total: int) -> None:
            shown.total = total
            shown.update(done - shown.n)

        yield show


def note(text: str) -> None:
    """A line about what goes on, above any bar."""
    from tqdm.auto import tqdm

    tqdm.write(text, file=sys.stdout if is_cell(sys.stdout) else sys.stderr)
