"""A picture of one rollout: running sequences, layouts, switches, and tokens from drafts.

Knows `RolloutTrace` and matplotlib, which is imported only when a picture is drawn.
"""

from bisect import bisect_left
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from pat_jax.common.picture_style import COMPUTED, layout_colour
from pat_jax.engine.record.running_plot import layout_runs, running_curve
from pat_jax.engine.record.trace import DraftTrace, Move, RolloutTrace

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_INK, _GREY, _DRAFTS = "#1f2933", "#6b7785", "#b4232c"
# Sources of accepted draft tokens: those of `draft_counts.SOURCES`, then drafts of other drafters.
_SOURCES = {
    "own text": "#b8651b",
    "siblings": "#3f9b8f",
    "earlier responses": "#7a5ea8",
    "drafts": "#b4232c",
}
_PREFILL, _PALE = "#6b7785", 0.18  # bands lie behind the curve

HEADROOM = 1.3  # above the curve, for the names of the layouts
MOST_TOLD = 12  # most switches described under the picture; the file has all


def plot_rollout(trace: RolloutTrace, path: str | Path) -> None:
    """Writes the picture to `path` (PNG) and the trace beside it (the same name, `.json`).

    Args:
      trace: the rollout.
      path: path of the picture; its folder is made if missing.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    draw_rollout(trace).savefig(path)
    path.with_suffix(".json").write_text(trace.to_json() + "\n", encoding="utf-8")


def draw_rollout(trace: RolloutTrace) -> "Figure":
    return draw_rollouts({"": trace}, height=3.8)


def draw_rollouts(traces: Mapping[str, RolloutTrace], *, height: float = 3.2) -> "Figure":
    """Draws rollouts one below the other, over the same seconds.

    Args:
      traces: traces by their titles.
      height: height of each picture in inches.
    """
    from pat_jax.common.picture import Picture

    told = [line for trace in traces.values() for line in _told(trace)]
    figure = Picture(9.0, height * len(traces) + 0.16 * len(told))
    longest = max(trace.total_s for trace in traces.values())
    for place, (name, trace) in enumerate(traces.items(), start=1):
        axes = figure.add_subplot(len(traces), 1, place)
        _draw_on(axes, trace, name, right=longest)
    if told:
        figure.supxlabel("\n".join(told), x=0.01, ha="left", fontsize=8, color=_INK)
    return figure


def _draw_on(axes: "Axes", trace: RolloutTrace, name: str, right: float) -> None:
    """Draws one rollout; the axis of seconds ends at `right` or later."""
    edges = [*trace.times_s, trace.total_s]  # of bursts
    at, running = running_curve(trace, edges)
    axes.set_xlim(0, max(edges[-1], right) or 1)
    axes.set_ylim(0, HEADROOM * max(*running, 1))
    _draw_bands(axes, trace, edges)
    axes.fill_between(at, running, step="post", color=_INK, alpha=0.08, linewidth=0)
    axes.step(at, running, where="post", color=_INK, linewidth=1.8)
    for number, switch in enumerate(trace.switches, start=1):
        _draw_switch(axes, switch, edges[bisect_left(trace.steps, switch.step)], number)
    _dress(axes, trace, name)
    if max(trace.drafts.tokens_per_step, default=1.0) > 1.0:
        _draw_drafts(axes, trace, edges)


def _draw_drafts(axes: "Axes", trace: RolloutTrace, edges: list[float]) -> None:
    """Draws the tokens per step and sequence, on a scale on the right: one token, and accepted
    draft tokens by source."""
    right = axes.twinx()
    drafts = trace.drafts
    per_step = [*drafts.tokens_per_step, drafts.tokens_per_step[-1]]
    bottom = np.ones(len(per_step))
    for name, counts in _accepted_by_source(drafts).items():
        part = np.array(counts) / np.maximum(drafts.accepted, 1) * (np.array(per_step[:-1]) - 1)
        top = bottom + np.append(part, part[-1])
        options = {"label": name, "color": _SOURCES[name], "alpha": 0.5, "linewidth": 0}
        right.fill_between(edges, bottom, top, step="post", **options)
        bottom = top
    right.step(edges, per_step, where="post", color=_DRAFTS, linewidth=1.2)
    right.set_ylim(0, HEADROOM * max(per_step))
    right.set_ylabel("tokens a step and sequence", color=_DRAFTS)
    right.tick_params(colors=_DRAFTS, labelsize=9)
    right.spines[["top", "left", "bottom"]].set_visible(False)
    right.spines["right"].set_color(_DRAFTS)
    if any(drafts.accepted):  # beside the name of the axis below
        place = {"loc": "upper right", "bbox_to_anchor": (1.0, -0.07), "borderaxespad": 0.0}
        right.legend(**place, ncols=4, frameon=False, fontsize=8, handlelength=1.0)


def _accepted_by_source(drafts: DraftTrace) -> dict[str, list[int]]:
    """Accepted draft tokens of each burst, for each source with any."""
    *copied, others = _SOURCES
    known = {name: [burst[i][1] for burst in drafts.by_source] for i, name in enumerate(copied)}
    rest = [all_of - sum(of) for all_of, *of in zip(drafts.accepted, *known.values(), strict=True)]
    return {name: counts for name, counts in (known | {others: rest}).items() if any(counts)}


def _draft_words(drafts: DraftTrace) -> str:
    *sources, _ = _SOURCES
    counts = {name: sum(of) for name, of in _accepted_by_source(drafts).items() if name in sources}
    parts = ", ".join(f"{name} {count:,}" for name, count in counts.items())
    text = f"drafts: {sum(drafts.drafted):,} tokens drafted, {sum(drafts.accepted):,} accepted"
    text += f" ({parts})" if parts else ""
    if drafts.saving_s is None or drafts.predicted_saving_s is None:
        return text
    return (
        f"{text}; saved {_seconds(drafts.saving_s)} "
        f"(predicted {_seconds(drafts.predicted_saving_s)})"
    )


def _draw_bands(axes: "Axes", trace: RolloutTrace, edges: list[float]) -> None:
    """Draws one band for the prefill and for each run of bursts in the same layout."""
    prefill = [("prefill", 0.0, edges[0])] if edges[0] > 0 else []
    for name, left, right in (*prefill, *layout_runs(trace, edges)):
        colour = _PREFILL if name == "prefill" else layout_colour(name)
        axes.axvspan(left, right, color=colour, alpha=_PALE, linewidth=0, zorder=0)
        share = (right - left) / axes.get_xlim()[1]
        if share < 0.02:  # no room for a name
            continue
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


def _draw_switch(axes: "Axes", switch: Move, x: float, number: int) -> None:
    """Draws a dark strip as wide as the switch took, a dashed line at its end, and its number."""
    axes.axvline(x, color=_INK, linewidth=1.0, linestyle=(0, (4, 3)))
    axes.axvspan(x - switch.seconds, x, color=_INK, alpha=0.45, linewidth=0)
    axes.text(
        x,
        1.01,
        str(number),
        transform=axes.get_xaxis_transform(),
        ha="center",
        va="bottom",
        fontsize=8,
        color=_INK,
    )


def _switch_words(switch: Move, number: int) -> str:
    moved = "" if switch.sent is None else f", {_bytes(switch.sent.total)} moved"
    told = (
        f"{number}: {switch.source} to {switch.target} at {switch.running:,} running, {switch.kv} KV{moved}; "
        f"cost {_seconds(switch.seconds)}"
    )
    if not switch.predicted_cost_s:  # scripted
        return told
    return (
        f"{told} (predicted {_seconds(switch.predicted_cost_s)}), "
        f"predicted saving {_seconds(switch.predicted_saving_s)}"
    )


def _told(trace: RolloutTrace) -> list[str]:
    """The lines of text under the picture."""
    told = [_switch_words(switch, i) for i, switch in enumerate(trace.switches, start=1)]
    if len(told) > MOST_TOLD:
        told[MOST_TOLD:] = [f"and {len(told) - MOST_TOLD} more: see the .json beside this picture"]
    if any(trace.drafts.drafted):
        told.append(_draft_words(trace.drafts))
    return told


def _dress(axes: "Axes", trace: RolloutTrace, name: str) -> None:
    below = "seconds since the rollout began"
    axes.set_xlabel(below, loc="left" if any(trace.drafts.accepted) else "center")
    axes.set_ylabel("running sequences")
    switches = len(trace.switches)
    pad = 18 if switches else 6  # above the numbers of the switches
    axes.set_title(
        f"{name}{': ' * bool(name)}{max(trace.running, default=0):,} responses in {_seconds(trace.total_s)}:"
        f" {trace.total_steps:,} decode steps, {switches} switch{'' if switches == 1 else 'es'}",
        loc="left",
        fontsize=10,
        color=_INK,
        pad=pad,
    )
    if trace.is_computed:
        axes.set_title(COMPUTED, loc="right", fontsize=10, color=_DRAFTS, pad=pad)
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
