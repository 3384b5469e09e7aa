"""The table of docs/metrics.md, as tests hold it against what runs write."""

import re
from pathlib import Path

PATH = Path(__file__).parent.parent / "docs" / "metrics.md"
STAND_INS = ("NAME", "CAUSE", "KEY", "SET", "K")


def told_metrics() -> list[list[str]]:
    """The cells of each row: name, unit, meaning, TRL's name, verl's."""
    names = PATH.read_text(encoding="utf-8").partition("## All names")[2]
    rows = re.findall(r"^\| (`\w+/.*) \|$", names, re.MULTILINE)
    return [[cell.strip().strip("`") for cell in row.split("|")] for row in rows]


def untold(names: set[str]) -> set[str]:
    """Those of the names that no row of the table stands for."""
    stands_for = re.compile(
        "|".join(
            re.sub("|".join(STAND_INS), r"[\\w.-]+", re.escape(row[0])) for row in told_metrics()
        )
    )
    return {name for name in names if not stands_for.fullmatch(name)}
