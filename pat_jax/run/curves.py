"""What a run's metrics look like over its steps: the picture of how it learned.

Knows names of metrics. Does not know how they came about.
"""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Rows = Sequence[Mapping[str, Any]]

# A panel for each line, with what is drawn in it where the run measured it.
PANELS: Sequence[Sequence[str]] = (
    ("reward/mean", "eval/reward"),
    ("train/loss", "eval/loss"),
    ("rollout/length_p50", "rollout/length_max"),
    ("timing/rollout", "timing/reward", "timing/update"),
)
MOST_MARKED = 12  # points that are marked one by one, as those of evaluations are


def draw_curves(rows: Rows, panels: Sequence[Sequence[str]] = PANELS) -> "Figure":
    """A panel for each group of metrics that has some, over the steps.

    Args:
      rows: as `metrics.read_metrics` gives them.
    """
    from pat_jax.common.picture import Picture

    found = [names for panel in panels if (names := [x for x in panel if _points(rows, x)])]
    figure = Picture(3.6 * max(1, len(found)), 3.0)
    for axes, names in zip(
        figure.subplots(1, max(1, len(found)), squeeze=False)[0], found, strict=False
    ):
        _draw(axes, rows, names)
    return figure


def _draw(axes: "Axes", rows: Rows, names: Sequence[str]) -> None:
    for name in names:
        points = _points(rows, name)
        marker = "o" if len(points) <= MOST_MARKED else None
        axes.plot(*zip(*points, strict=True), marker=marker, markersize=3, label=name)
    axes.set_xlabel("step")
    axes.legend(frameon=False, fontsize=8)
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(labelsize=8)


def _points(rows: Rows, name: str) -> list[tuple[int, float]]:
    """(step, value) of the steps that measured it."""
    return [(row["step"], row[name]) for row in rows if name in row]
