"""Progress bars, shown on terminals and in notebooks only.

tqdm is imported when the first bar is shown.
"""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TextIO

if TYPE_CHECKING:
    from tqdm import tqdm


def is_cell(stream: TextIO) -> bool:
    """Returns whether the stream appears under a cell of a notebook."""
    return type(stream).__module__.startswith("ipykernel")


def bar(*iterable: Any, **options: Any) -> "tqdm":
    """Returns `tqdm(*iterable, **options)`, disabled if it is neither on a terminal nor in a
    notebook."""
    from tqdm.auto import tqdm

    shown = {"disable": None, "dynamic_ncols": True} | options
    if is_cell(sys.stdout):
        shown["disable"] = False
    return tqdm(*iterable, **shown)


@contextmanager
def counting(what: str, **options: Any) -> Iterator[Callable[[int, int], None]]:
    """Shows a progress bar of programs. Yields a function that sets the numbers done and in all."""
    with bar(total=0, unit="program", desc=what, **options) as shown:

        def show(done: int, total: int) -> None:
            shown.total = total
            shown.update(done - shown.n)

        yield show


def note(text: str) -> None:
    """Prints a line of text above any progress bar."""
    from tqdm.auto import tqdm

    tqdm.write(text, file=sys.stdout if is_cell(sys.stdout) else sys.stderr)
