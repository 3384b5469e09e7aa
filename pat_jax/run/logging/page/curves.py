"""Curves of a run: metrics over the steps, and the layouts of each rollout.

Knows names of metrics. Does not know how they are measured.
"""

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import isfinite, nan
from statistics import fmean
from typing import Any

from pat_jax.common.html.charts import Axis, Line, Plot, Points, colour
from pat_jax.common.html.figure import Figure

Rows = Sequence[Mapping[str, Any]]


@dataclass(frozen=True)
class Panel:
    words: str  # label of the axis, with its unit
    names: Sequence[str]  # metrics; only those that the run measured are drawn
    is_told_at_zero: bool = True  # also draw a metric that is always 0


PANELS: Sequence[Panel] = (
    Panel("reward", ("reward/mean", "eval/reward")),
    Panel("loss", ("train/loss", "eval/loss")),
    Panel("accuracy on pairs", ("train/accuracy", "eval/accuracy")),
    Panel("length of a response, tokens", ("rollout/length_p50", "rollout/length_max")),
    Panel("time of a step, s", ("timing/rollout", "timing/reward", "timing/update")),
    Panel("entropy of the next token, nats", ("train/entropy",)),
    Panel("norm of the gradient", ("train/grad_norm",)),
    Panel("KL divergence, nats", ("train/approx_kl", "train/reference_kl"), False),
    Panel("loss of the critic", ("critic/loss",)),
    Panel("explained variance of the returns", ("critic/explained_variance",)),
    Panel("values and returns, mean of a token", ("critic/value_mean", "critic/return_mean")),
    Panel("rollout, tokens/s of all devices", ("rollout/tokens_per_s",)),
)
IN_A_ROW = 3  # panels of a picture
MOST_POINTS = 400  # of a curve; with more steps, a point is the mean of several
MOST_DOTS = 30  # a curve of more points has no markers
MOST_COLUMNS = 200  # of a ribbon; with more steps, several share a column
_LAYOUT = re.compile(r"dp[1-9]\d{0,5}tp[1-9]\d{0,5}")


def draw_curves(rows: Rows, panels: Sequence[Panel] = PANELS) -> Figure:
    """Returns a picture with a chart for each group of metrics that the run has measured. `rows`
    are those of `read_metrics`."""
    found = [*charts(rows, panels)]
    return Figure(found, columns=max(1, min(IN_A_ROW, len(found))), width=340, height=200)


def charts(rows: Rows, panels: Sequence[Panel] = PANELS) -> Iterator[Plot]:
    """Yields a chart for each panel that has metrics."""
    for panel in panels:
        measured = {name: [row[name] for row in rows if name in row] for name in panel.names}
        names = [
            name
            for name, values in measured.items()
            if any(values) or (panel.is_told_at_zero and values)
        ]
        if names:
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
    return [
        (row["step"], number(row[name]), number(row.get(f"{name}_ci95")))
        for row in rows
        if name in row
    ]


def numbers(rows: Rows, name: str) -> list[float]:
    """Returns the finite values of a metric, in the order of the steps."""
    return [value for _, value, _ in curve(rows, name) if isfinite(value)]


def number(value: Any) -> float:
    """Returns the value as a float, or NaN if it is not a finite number."""
    return float(value) if isinstance(value, int | float) and isfinite(value) else nan


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
