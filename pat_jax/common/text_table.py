"""Formats tables of text, with numbers aligned to the right and words to the left."""

from collections.abc import Sequence
from typing import NamedTuple

Cell = str | int | float | None


class Table(NamedTuple):
    header: Sequence[str]
    rows: Sequence[Sequence[Cell]]


def text_table(header: Sequence[str], rows: Sequence[Sequence[Cell]]) -> str:
    """Returns a table with one line for each row. A cell of None is empty."""
    texts = [[shown(cell) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(header, *texts, strict=True)]
    is_number = [
        all(not isinstance(row[i], str) for row in rows) and bool(rows) for i in range(len(header))
    ]
    lines = [header, *texts]
    return "\n".join(
        "  ".join(
            cell.rjust(width) if right else cell.ljust(width)
            for cell, width, right in zip(line, widths, is_number, strict=True)
        ).rstrip()
        for line in lines
    )


def shown(cell: Cell) -> str:
    """Returns a cell as text: numbers with three significant digits; integers and numbers from
    1,000 stay whole."""
    if cell is None:
        return ""
    if isinstance(cell, str):
        return cell
    if isinstance(cell, int) or abs(cell) >= 999.5:
        return f"{cell:,.0f}"
    return f"{cell:.3g}"


def starred(numbers: Sequence[float | None]) -> list[str]:
    """Formats numbers, with a star at the least of them."""
    least = min((x for x in numbers if x is not None), default=None)
    return [shown(x) + "*" * (x is not None and x == least) for x in numbers]


def percent(share: float) -> str:
    return f"{100 * share:.1f} %"
