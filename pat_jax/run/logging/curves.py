"""Draws the metrics of a run over its steps.

Knows names of metrics. Does not know how they came about.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import isfinite, nan
from typing import TYPE_CHECKING, Any

from pat_jax.common.picture_style import colour

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

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
MOST_MARKED = 12  # a curve of more points has no markers
IN_A_ROW = 4  # panels


def draw_curves(rows: Rows, panels: Sequence[Panel] = PANELS) -> "Figure":
    """Returns a figure with a panel for each group of metrics that the run has measured. `rows` are
    those of `read_metrics`."""
    from pat_jax.common.picture import Picture

    found = [(panel, names) for panel in panels if (names := drawn_names(rows, panel))]
    across, down = min(IN_A_ROW, max(1, len(found))), max(1, -(-len(found) // IN_A_ROW))
    figure = Picture(3.6 * across, 3.0 * down)
    every = [*figure.subplots(down, across, squeeze=False).flat]
    for axes, (panel, names) in zip(every, found, strict=False):
        _draw(axes, rows, names)
        axes.set_ylabel(panel.words, fontsize=8)
    for axes in every[max(1, len(found)) :]:
        axes.remove()
    return figure


def drawn_names(rows: Rows, panel: Panel) -> list[str]:
    """Returns the metrics of a panel that the run has measured."""

    def is_drawn(name: str) -> bool:
        values = [row[name] for row in rows if name in row]
        return any(values) or (panel.is_told_at_zero and bool(values))

    return [name for name in panel.names if is_drawn(name)]


def number(value: Any) -> float:
    """Returns the value as a float, or NaN if it is not a finite number."""
    return float(value) if isinstance(value, int | float) and isfinite(value) else nan


def half_width(row: Mapping[str, Any], name: str) -> float:
    """Returns half of a metric's 95 % interval, or NaN if there is none."""
    return number(row.get(f"{name}_ci95"))


def _draw(axes: "Axes", rows: Rows, names: Sequence[str]) -> None:
    for i, name in enumerate(names):
        measured = [row for row in rows if name in row]
        steps, values = zip(*((row["step"], row[name]) for row in measured), strict=True)
        marker = "o" if len(steps) <= MOST_MARKED else None
        axes.plot(steps, values, marker=marker, markersize=3, label=name, color=colour(i))
        if any(f"{name}_ci95" in row for row in measured):
            ends = [
                (number(row[name]) - half, number(row[name]) + half)
                for row in measured
                for half in [half_width(row, name)]
            ]
            low, high = zip(*ends, strict=True)
            axes.fill_between(steps, low, high, color=colour(i), alpha=0.18, linewidth=0)
    axes.set_xlabel("step")
    axes.legend(frameon=False, fontsize=8)
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(labelsize=8)
