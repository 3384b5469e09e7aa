"""Progress bars: on a terminal, under the cell of a notebook, and nowhere else.

tqdm is imported when the first one is shown.
"""

import sys
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


def note(text: str) -> None:
    """A line about what goes on, above any bar."""
    from tqdm.auto import tqdm

    tqdm.write(text, file=sys.stdout if is_cell(sys.stdout) else sys.stderr)
