"""Curves of runs: metrics over the steps, as data for a page's script or as a picture.

Does not know which metrics there are (`panels.py`), nor how they are measured.
"""

from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from math import isfinite
from typing import Any

from pat_jax.common.html.charts import Axis, Line, Plot, colour
from pat_jax.common.html.figure import Figure
from pat_jax.engine.record.plot import running_plot
from pat_jax.engine.record.trace import RolloutTrace
from pat_jax.run.logging.page.panels import (
    PANELS,
    Panel,
    Rows,
    number,
    other_panels,
    panels_of,
    with_derived,
)

Chart = dict[str, Any]  # what `charts.js` draws
Point = tuple[float, float, float]  # step, value, half of its interval

IN_A_ROW = 3  # panels of a picture
MOST_POINTS = 600  # of all curves of one metric; a run of more steps keeps extremes
LARGEST = 1e300  # the difference of two such numbers is finite
MOST_DOTS = 30  # a curve of more points has no markers
# Attributes of a switch: seconds from its start to the rollout's end, and the words on the page.
PREDICTED = {"end as predicted": "predicted_remaining_s", "had it stayed": "predicted_stay_s"}


def board(runs: Mapping[str, Rows]) -> dict[str, list[Chart]]:
    """Returns the charts of each section of a page. Those of one run have a curve for each metric
    of a panel; those of several are of one metric, with a curve for each run.

    Args:
      runs: rows of `read_metrics` by the name of the run.
    """
    rows_of = {run: [with_derived(row) for row in rows] for run, rows in runs.items()}
    every = [row for rows in rows_of.values() for row in rows]
    sections: dict[str, list[Chart]] = {}
    for panel, names in (*panels_of(every), *other_panels(every)):
        found = sections.setdefault(panel.section, [])
        if len(runs) == 1:
            ((_, rows),) = rows_of.items()
            found.append(_chart(panel, panel.title, [(_label(x), 0, rows, x) for x in names]))
            continue
        for name in names:
            title = panel.title if len(names) == 1 else f"{panel.title}: {_label(name)}"
            lines = [(run, i, rows, name) for i, (run, rows) in enumerate(rows_of.items())]
            found.append(_chart(panel, title, lines))
    return sections


def _chart(panel: Panel, title: str, curves: Sequence[tuple[str, int, Rows, str]]) -> Chart:
    """Returns a chart of the curves: of each the label, the number of the run, its rows, and the
    metric."""
    most = MOST_POINTS // (1 + max(run for _, run, _, _ in curves))
    lines = []
    for i, (label, run, rows, name) in enumerate(curves):
        points = thinned(curve(rows, name), most)
        if not points:
            continue
        steps, values, halves, means = zip(*points, strict=True)
        line = {"name": label, "run": run, "colour": i, "x": steps}
        line |= {"y": [*map(_short, values)], "sparse": name.startswith(("eval/", "beside/"))}
        if (mean := [*map(_short, means)]) != line["y"]:
            line["mean"] = mean
        if any(map(isfinite, halves)):
            line["half"] = [*map(_short, halves)]
        lines.append(line)
    return {"title": title, "log": panel.is_log, "lines": lines}


def _label(name: str) -> str:
    """Returns the metric, or the part that `with_derived` has named."""
    namespace, _, rest = name.partition("/")
    return rest if namespace in ("seconds", "beside", "drafts", "accepted") else name


def _short(value: float | None) -> float | None:
    """Returns the value with five digits, or None if no axis can show it."""
    return float(f"{value:.5g}") if value is not None and abs(value) < LARGEST else None


def thinned(points: Sequence[Point], most: int) -> list[tuple[float, float, float, float]]:
    """Returns at most `most` of the points, each with the mean of its part of the curve: the lowest
    and the highest of each part, in order, and the last of all."""
    kept = []
    for part in _parts(points, most if len(points) <= most else max(1, most // 2)):
        known = [point for point in part if isfinite(point[1])] or part[:1]
        mean = sum(y for _, y, _ in known) / len(known)
        ends = {min(known, key=lambda point: point[1]), max(known, key=lambda point: point[1])}
        if len(ends) == 1 or part[-1] is points[-1]:  # parts of equal values weigh no less
            ends.add(part[-1])
        kept += [(*point, mean) for point in sorted(ends)]
    return kept


def clocks(runs: Mapping[str, Rows]) -> list[Chart]:
    """Returns the name of each run, and the minutes of training, compiling not counted, that it
    took to some of its steps."""
    found = []
    for run, rows in runs.items():
        minutes = 0.0
        at = [(0, 0.0)]
        for row in map(with_derived, rows):
            step_s = number(row.get("seconds/step"))
            minutes += step_s / 60 if isfinite(step_s) else 0.0
            at.append((row["step"], round(minutes, 4)))
        few = [part[-1] for part in _parts(at, MOST_POINTS)]
        found.append({"run": run, "steps": [x for x, _ in few], "minutes": [x for _, x in few]})
    return found


def timeline(trace: RolloutTrace) -> Chart:
    """Returns a chart of a rollout over its seconds: running sequences, bands of layouts, and the
    ends that the planner predicted at each switch."""
    plot = running_plot(trace)
    (running,) = plot.lines
    at = [point[0] for point in running.points]
    lines = [_polyline("running", at, [point[1] for point in running.points])]
    lines[0] |= {"stairs": True}
    told = [switch for switch in trace.switches if switch.predicted_remaining_s]
    for j, (name, field) in enumerate(PREDICTED.items(), start=1):
        at = [(x.at_s, x.at_s + getattr(x, field), None) for x in told]
        heights = [(x.running, 0, None) for x in told]
        if told:
            lines.append(_polyline(name, chain(*at), chain(*heights)) | {"dash": j})
    return {
        "title": plot.up_words,
        "across": plot.across_words,
        "lines": lines,
        "bands": [(x.name, x.left, x.right, x.colour, x.opacity) for x in plot.bands],
    }


def _polyline(name: str, x: Iterable[float | None], y: Iterable[float | None]) -> Chart:
    """Returns a line in the colour of text; a point of None is a gap."""
    return {"name": name, "x": [*map(_short, x)], "y": [*map(_short, y)]}


def draw_curves(rows: Rows, names: Sequence[str] = ()) -> Figure:
    """Returns a picture with a chart for each of these metrics; without names, for each group of
    main metrics that the run has measured. `rows` are those of `read_metrics`."""
    rows = [with_derived(row) for row in rows]
    main = [panel for panel in PANELS if panel.is_main]
    chosen = [("", [name]) for name in names] or [
        (panel.title, found) for panel, found in panels_of(rows, main)
    ]
    plots = [_plot(rows, title, found) for title, found in chosen]
    return Figure(plots, columns=max(1, min(IN_A_ROW, len(plots))), width=340, height=200)


def _plot(rows: Rows, words: str, names: Sequence[str]) -> Plot:
    """Returns a chart of these metrics over all steps."""
    lines = list[Line]()
    for i, name in enumerate(names):
        points = thinned(curve(rows, name), MOST_POINTS)
        interval = [(x, y - half, y + half) for x, y, half, _ in points]
        places = [(x, y) for x, y, _, _ in points]
        is_dotted = len(points) <= MOST_DOTS
        lines.append(Line(_label(name), places, colour(i), is_dotted=is_dotted, interval=interval))
    drawn = [point for line in lines for point in (*line.points, *line.interval)]
    heights = [y for _, *ys in drawn for y in ys if isfinite(y)]
    up = Axis.over(heights or [0.0])
    steps = [row["step"] for row in rows]
    low, high = min([0, *steps]), max([0, *steps])
    across = Axis(low, high if high > low else low + 1, is_whole=True)
    return Plot(lines, across, up, across_words="step", up_words=words, note="")


def curve(rows: Rows, name: str) -> list[Point]:
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


def _parts(items: Sequence[Any], most: int) -> list[Sequence[Any]]:
    """Splits the items into at most `most` parts of equal size."""
    each = max(1, -(-len(items) // most))
    return [items[i : i + each] for i in range(0, len(items), each)]
