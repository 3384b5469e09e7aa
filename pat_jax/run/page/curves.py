"""Curves of a run's page: metrics over the steps, and the layouts of each rollout."""

from collections.abc import Iterator, Sequence
from math import isfinite, nan
from statistics import fmean

from pat_jax.common.html.layouts import read_path, ribbon
from pat_jax.common.html.plots import Axis, Line, Points, plot
from pat_jax.common.picture_style import colour
from pat_jax.run.curves import PANELS, Panel, Rows, drawn_names, half_width, number

MOST_POINTS = 400  # of a curve; of more steps several are one point, their mean
MOST_DOTS = 30  # points that are marked one by one


def curves(rows: Rows) -> Iterator[str]:
    """A chart for each panel that has something."""
    for panel in PANELS:
        if names := drawn_names(rows, panel):
            yield panel_plot(rows, panel, names)


def panel_plot(rows: Rows, panel: Panel, names: Sequence[str]) -> str:
    found = [(name, curve(rows, name)) for name in names]
    return lines_plot(
        [line_of(name, points, i) for i, (name, points) in enumerate(found)], rows, panel.words
    )


def lines_plot(lines: Sequence[Line], rows: Rows, words: str) -> str:
    """Lines over the steps of all rows."""
    drawn = [point for line in lines for point in (*line.points, *line.spread)]
    heights = [y for _, *ys in drawn for y in ys if isfinite(y)]
    return plot(
        lines,
        across=steps_axis(rows),
        up=Axis.over(heights or [0.0]),
        across_words="step",
        up_words=words,
        note="",
    )


def line_of(name: str, points: Points, i: int) -> Line:
    """
    Args:
      points: step, value, and half of an interval around it.
      i: of the chart's lines, for its colour.
    """
    few = _thinned(points)
    spread = [(x, y - half, y + half) for x, y, half in few]
    is_dotted = len(few) <= MOST_DOTS
    return Line(name, [point[:2] for point in few], colour(i), is_dotted=is_dotted, spread=spread)


def curve(rows: Rows, name: str) -> list[tuple[float, float, float]]:
    """(step, value, half of its interval) of the steps that have the metric.

    What is no number is NaN.
    """
    return [(row["step"], number(row[name]), half_width(row, name)) for row in rows if name in row]


def numbers(rows: Rows, name: str) -> list[float]:
    """What the steps measured, in their order, without what is no number."""
    return [value for _, value, _ in curve(rows, name) if isfinite(value)]


def steps_axis(rows: Rows) -> Axis:
    steps = [row["step"] for row in rows]
    low, high = min([0, *steps]), max([0, *steps])
    return Axis(low, high if high > low else low + 1, is_whole=True)


def layouts(rows: Rows) -> str:
    """The ribbon; empty before the first rollout."""
    told = [(row["step"], read_path(row.get("rollout/layouts"))) for row in rows]
    paths = [(step, path) for step, path in told if path]
    return ribbon(paths, steps_axis(rows)) if paths else ""


def _thinned(points: Points) -> Points:
    each = -(-len(points) // MOST_POINTS)
    if each <= 1:
        return points
    parts = (points[i : i + each] for i in range(0, len(points), each))
    return [tuple(map(_mean, zip(*part, strict=True))) for part in parts]


def _mean(values: Sequence[float]) -> float:
    """Of what is a number."""
    known = [value for value in values if isfinite(value)]
    return fmean(known) if known else nan
