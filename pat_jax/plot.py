"""A picture of one rollout: live sequences over time, the layout in force, the switches.

Knows `RolloutTrace` and matplotlib, which is imported only when a picture is drawn.
"""

from bisect import bisect_left
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import numpy as np

from pat_jax.engine.trace import RolloutTrace, Switch

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_INK, _GREY = "#1f2933", "#6b7785"
_BANDS = ("#d6e6fb", "#fce6c0", "#d3eed9", "#f2d9ee", "#e2e0f7", "#fad9d3")

Axis = Literal["time", "step"]


def plot_rollout(trace: RolloutTrace, path: str | Path, *, axis: Axis = "time") -> None:
    """Write the picture to `path` (PNG) and the trace beside it (the same name, `.json`).

    Args:
      trace: the rollout.
      path: where the picture goes; its folder is made when missing.
      axis: what runs to the right, seconds or decode steps.
    """
    # A figure without pyplot leaves the backend and the open figures of a notebook alone.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure = Figure(figsize=(9.0, 3.8), dpi=160, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    edges = _edges(trace, axis)
    at, live = _live_curve(trace, edges)
    axes.set_xlim(0, edges[-1] or 1)
    axes.set_ylim(0, 1.08 * max(*live, 1))
    _draw_bands(axes, trace, edges)
    axes.fill_between(at, live, step="post", color=_INK, alpha=0.08, linewidth=0)
    axes.step(at, live, where="post", color=_INK, linewidth=1.8)
    for order, switch in enumerate(trace.switches):
        _draw_switch(axes, switch, _position(trace, switch, edges), order, axis)
    _dress(axes, trace, axis)
    figure.savefig(path)
    path.with_suffix(".json").write_text(trace.to_json() + "\n", encoding="utf-8")


def _edges(trace: RolloutTrace, axis: Axis) -> list[float]:
    """Where each burst begins, and where the last one ends."""
    if axis == "time":
        return [*trace.times_s, trace.total_s]
    return [*trace.steps, trace.total_steps]


def _live_curve(trace: RolloutTrace, edges: list[float]) -> tuple[list[float], list[int]]:
    """Where the number of live sequences changes, and what it is from there on."""
    if not trace.done_after:
        return edges, [*trace.live, 0]
    num_live = len(trace.done_after)
    ends = np.interp(trace.done_after, [*trace.steps, trace.total_steps], edges)
    return [edges[0], *ends.tolist()], list(range(num_live, -1, -1))


def _position(trace: RolloutTrace, switch: Switch, edges: list[float]) -> float:
    return edges[bisect_left(trace.steps, switch.step)]


def _draw_bands(axes: "Axes", trace: RolloutTrace, edges: list[float]) -> None:
    """One band for the prefill and for each run of bursts under the same layout."""
    colours = {name: _BANDS[i % len(_BANDS)] for i, name in enumerate(dict.fromkeys(trace.layout))}
    if edges[0] > 0:
        _draw_band(axes, 0, edges[0], "prefill", "#e9ecef")
    start = 0
    for layout, bursts in groupby(trace.layout):
        stop = start + len(list(bursts))
        _draw_band(axes, edges[start], edges[stop], layout, colours[layout])
        start = stop


def _draw_band(axes: "Axes", left: float, right: float, name: str, colour: str) -> None:
    axes.axvspan(left, right, color=colour, linewidth=0, zorder=0)
    share = (right - left) / axes.get_xlim()[1]
    if share < 0.02:  # no room for a name
        return
    axes.text(
        (left + right) / 2,
        0.975,
        name,
        transform=axes.get_xaxis_transform(),
        rotation=90 if share < 0.08 else 0,
        ha="center",
        va="top",
        fontsize=9,
        fontweight="bold",
        color=_INK,
    )


def _draw_switch(axes: "Axes", switch: Switch, x: float, order: int, axis: Axis) -> None:
    """A dashed line where decoding went on, a dark strip as wide as the switch took, the figures."""
    axes.axvline(x, color=_INK, linewidth=1.0, linestyle=(0, (4, 3)))
    if axis == "time":
        axes.axvspan(x - switch.seconds, x, color=_INK, alpha=0.45, linewidth=0)
    is_late = x > 0.75 * axes.get_xlim()[1]  # no room to the right
    axes.annotate(
        f"{switch.kv} KV, {_bytes(switch.bytes_moved)}\n"
        f"predicted saving {_seconds(switch.predicted_saving_s)}\n"
        f"cost {_seconds(switch.seconds)} (predicted {_seconds(switch.predicted_cost_s)})",
        (x, 0.84 - 0.22 * (order % 3)),
        xycoords=axes.get_xaxis_transform(),
        xytext=(-6 if is_late else 6, 0),
        textcoords="offset points",
        ha="right" if is_late else "left",
        va="top",
        fontsize=8,
        color=_INK,
        linespacing=1.25,
        zorder=5,  # above the lines of later switches
        bbox={"boxstyle": "round,pad=0.3", "facecolor": "white", "edgecolor": "none", "alpha": 0.9},
    )


def _dress(axes: "Axes", trace: RolloutTrace, axis: Axis) -> None:
    axes.set_xlabel("seconds since the rollout began" if axis == "time" else "decode steps")
    axes.set_ylabel("live sequences")
    switches = len(trace.switches)
    axes.set_title(
        f"{max(trace.live, default=0):,} responses in {_seconds(trace.total_s)}:"
        f" {trace.total_steps:,} decode steps, {switches} switch{'' if switches == 1 else 'es'}",
        loc="left",
        fontsize=10,
        color=_INK,
    )
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(_GREY)
    axes.tick_params(colors=_GREY, labelsize=9)
    axes.xaxis.label.set_color(_GREY)
    axes.yaxis.label.set_color(_GREY)


def _seconds(seconds: float) -> str:
    if abs(seconds) < 0.9995:
        return f"{1000 * seconds:.3g} ms"
    return f"{seconds:.3g} s" if abs(seconds) < 999.5 else f"{seconds:,.0f} s"


def _bytes(number: float) -> str:
    for unit in ("B", "KiB", "MiB"):
        if number < 999.5:
            return f"{number:.3g} {unit}"
        number /= 1024
    return f"{number:,.1f} GiB"
