"""Curves of a run's page: metrics over the steps, and the layouts of each rollout."""

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from math import isfinite, nan
from statistics import fmean
from typing import Any

from pat_jax.common.html.charts import Axis, Line, Plot, Points
from pat_jax.common.picture_style import colour
from pat_jax.run.logging.curves import PANELS, Rows, drawn_names, half_width, number

MOST_POINTS = 400  # of a curve; with more steps, a point is the mean of several
MOST_DOTS = 30  # a curve of more points has no markers
MOST_COLUMNS = 200  # of a ribbon; with more steps, several share a column
_LAYOUT = re.compile(r"dp[1-9]\d{0,5}tp[1-9]\d{0,5}")


def panels(rows: Rows) -> Iterator[Plot]:
    """Yields a chart for each panel that has metrics."""
    for panel in PANELS:
        if names := drawn_names(rows, panel):
            yield plot({name: curve(rows, name) for name in names}, rows, panel.words)


def plot(curves: Mapping[str, Points], rows: Rows, words: str) -> Plot:
    """Returns a chart of lines over all steps. `curves` has the points of `curve`, by name."""
    lines = [_line(name, points, i) for i, (name, points) in enumerate(curves.items())]
    drawn = [point for line in lines for point in (*line.points, *line.interval)]
    heights = [y for _, *ys in drawn for y in ys if isfinite(y)]
    up = Axis.over(heights or [0.0])
    return Plot(lines, steps_axis(rows), up, across_words="step", up_words=words, note="")


def _line(name: str, points: Points, i: int) -> Line:
    few = [tuple(map(_mean, zip(*part, strict=True))) for part in _parts(points, MOST_POINTS)]
    return Line(
        name,
        [point[:2] for point in few],
        colour(i),
        is_dotted=len(few) <= MOST_DOTS,
        interval=[(x, y - half, y + half) for x, y, half in few],
    )


def curve(rows: Rows, name: str) -> list[tuple[float, float, float]]:
    """Returns (step, value, half of its interval) for each step that has the metric; a value or
    interval that is missing is NaN."""
    return [(row["step"], number(row[name]), half_width(row, name)) for row in rows if name in row]


def numbers(rows: Rows, name: str) -> list[float]:
    """Returns the finite values of a metric, in the order of the steps."""
    return [value for _, value, _ in curve(rows, name) if isfinite(value)]


def _path(text: object) -> tuple[str, ...]:
    """Parses a path such as `dp2tp1 -> dp1tp2`. Returns () for anything else."""
    names = text.split(" -> ") if isinstance(text, str) else []
    return tuple(names) if all(map(_LAYOUT.fullmatch, names)) else ()


def layouts(rows: Rows) -> list[tuple[int, int, tuple[str, ...]]]:
    """Returns the columns of the ribbon: the step where each begins and ends, and the layouts of
    its rollout, in order. With very many steps, a column covers several and has the path that is
    most frequent among them."""
    known = [(row["step"], path) for row in rows if (path := _path(row.get("rollout/layouts")))]
    return [
        (part[0][0] - 1, part[-1][0], Counter(path for _, path in part).most_common(1)[0][0])
        for part in _parts(known, MOST_COLUMNS)
    ]


def steps_axis(rows: Rows) -> Axis:
    steps = [row["step"] for row in rows]
    low, high = min([0, *steps]), max([0, *steps])
    return Axis(low, high if high > low else low + 1, is_whole=True)


def _parts(items: Sequence[Any], most: int) -> list[Sequence[Any]]:
    """Splits the items into at most `most` parts of equal size."""
    each = max(1, -(-len(items) // most))
    return [items[i : i + each] for i in range(0, len(items), each)]


def _mean(values: Sequence[float]) -> float:
    """Returns the mean of the finite values, or NaN if there is none."""
    known = [value for value in values if isfinite(value)]
    return fmean(known) if known else nan
