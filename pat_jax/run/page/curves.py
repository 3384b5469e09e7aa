"""Curves of a run's page: metrics over the steps, and the layouts of each rollout."""

from collections.abc import Iterator, Sequence
from math import isfinite, nan
from statistics import fmean

from pat_jax.common.html.charts import Axis, Line, Plot, Points
from pat_jax.common.html.layouts import Ribbon, read_path
from pat_jax.common.picture_style import colour
from pat_jax.run.curves import PANELS, Rows, drawn_names, half_width, number

MOST_POINTS = 400  # of a curve; of more steps several are one point, their mean
MOST_DOTS = 30  # points that are marked one by one


def panels(rows: Rows) -> Iterator[Plot]:
    """A chart for each panel that has something."""
    for panel in PANELS:
        if names := drawn_names(rows, panel):
            yield plot({name: curve(rows, name) for name in names}, rows, panel.words)


def plot(curves: dict[str, Points], rows: Rows, words: str) -> Plot:
    """Lines over the steps of all rows.

    Args:
      curves: by name, points of a step, a value, and half of an interval around it.
    """
    lines = [_line(name, points, i) for i, (name, points) in enumerate(curves.items())]
    drawn = [point for line in lines for point in (*line.points, *line.interval)]
    heights = [y for _, *ys in drawn for y in ys if isfinite(y)]
    up = Axis.over(heights or [0.0])
    return Plot(lines, _steps(rows), up, across_words="step", up_words=words, note="")


def _line(name: str, points: Points, i: int) -> Line:
    few = _thinned(points)
    return Line(
        name,
        [point[:2] for point in few],
        colour(i),
        is_dotted=len(few) <= MOST_DOTS,
        interval=[(x, y - half, y + half) for x, y, half in few],
    )


def curve(rows: Rows, name: str) -> list[tuple[float, float, float]]:
    """(step, value, half of its interval) of the steps that have the metric.

    What is no number is NaN.
    """
    return [(row["step"], number(row[name]), half_width(row, name)) for row in rows if name in row]


def numbers(rows: Rows, name: str) -> list[float]:
    """What the steps measured, in their order, without what is no number."""
    return [value for _, value, _ in curve(rows, name) if isfinite(value)]


def layouts(rows: Rows) -> Ribbon:
    paths = [(row["step"], read_path(row.get("rollout/layouts"))) for row in rows]
    return Ribbon([(step, path) for step, path in paths if path], _steps(rows))


def _steps(rows: Rows) -> Axis:
    steps = [row["step"] for row in rows]
    low, high = min([0, *steps]), max([0, *steps])
    return Axis(low, high if high > low else low + 1, is_whole=True)


def _thinned(points: Points) -> Points:
    each = max(1, -(-len(points) // MOST_POINTS))
    parts = (points[i : i + each] for i in range(0, len(points), each))
    return [tuple(map(_mean, zip(*part, strict=True))) for part in parts]


def _mean(values: Sequence[float]) -> float:
    """Of what is a number."""
    known = [value for value in values if isfinite(value)]
    return fmean(known) if known else nan
