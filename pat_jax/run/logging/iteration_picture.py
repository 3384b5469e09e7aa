"""A picture of one iteration: groups of devices against time, stages coloured, idle time white.

Knows stages by their names. matplotlib is imported only when a picture is drawn.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pat_jax.common.devices import Device
from pat_jax.common.picture_style import colour
from pat_jax.common.timeline import Span
from pat_jax.planning import stage_names
from pat_jax.planning.placement import Positions, in_ranges

LEAST = 1e-3  # share of an iteration that a stage must take to be drawn
# Stages by the first word of their names, in the order of their colours.
KINDS = (
    stage_names.ROLLOUT,
    stage_names.SCORES,
    stage_names.LOGPROBS,
    stage_names.VALUES,
    "gradients",
    "update",
    "weights",
)


@dataclass(frozen=True)
class PlacedSpan:
    """A stage of an iteration, on devices by their positions in the run's order."""

    name: str
    devices: Positions
    begin_s: float
    end_s: float

    @property
    def kind(self) -> str:
        """Its word in the legend; a step ends an update."""
        first = self.name.partition(" ")[0]
        return "update" if first == "step" else first


@dataclass(frozen=True)
class IterationStages:
    """The stages of one iteration.

    Attributes:
      step: the iteration, from 1.
      groups: the devices that no role divides.
      predicted_s: seconds of each stage as they were predicted; empty if they were not.
      tokens: of prompts and responses that a role's pass read, shared ones once; 0: nothing was
        learned.
    """

    step: int
    groups: Sequence[Positions]
    spans: Sequence[PlacedSpan]
    predicted_s: Mapping[str, float]
    tokens: int = 0

    @classmethod
    def of(
        cls,
        step: int,
        spans: Sequence[Span],
        devices: Sequence[Device],
        groups: Sequence[Positions],
        predicted_s: Mapping[str, float],
        tokens: int = 0,
    ) -> "IterationStages":
        """Returns those of `spans` that took a visible time; `devices` are in the run's order."""
        place = {device: i for i, device in enumerate(devices)}
        begin = min((x.begin_s for x in spans), default=0.0)
        whole = max((x.end_s for x in spans), default=0.0) - begin
        found = [
            PlacedSpan(
                x.name,
                tuple(sorted(place[d] for d in x.devices)),
                x.begin_s - begin,
                x.end_s - begin,
            )
            for x in spans
            if x.end_s - x.begin_s >= LEAST * whole
        ]
        return cls(step, groups, found, predicted_s, tokens)

    @property
    def seconds(self) -> Mapping[str, float]:
        """Seconds of each stage, all its parts together."""
        found: dict[str, float] = {}
        for span in self.spans:
            found[span.name] = found.get(span.name, 0.0) + span.end_s - span.begin_s
        return found

    def described(self) -> str:
        """Returns the seconds of each stage, with the predicted ones where they are known."""
        predicted = _as_measured(self.predicted_s, self.seconds)
        beside = {name: f" (predicted {seconds:.3g})" for name, seconds in predicted.items()}
        every = self.seconds.items()
        return ", ".join(f"{name} {seconds:.3g} s{beside.get(name, '')}" for name, seconds in every)


def _as_measured(predicted: Mapping[str, float], measured: Mapping[str, float]) -> dict[str, float]:
    """Returns predicted seconds by measured stages: an update is its gradients and its step."""
    parts = {name: stage_names.parts(name) for name in measured}
    return {
        name: sum(predicted[x] for x in of)
        for name, of in parts.items()
        if all(x in predicted for x in of)
    }


def plot_iteration(stages: IterationStages, path: Path, run: Mapping[str, Any]) -> None:
    """Writes the picture to `path` (PNG), and the stages beside it (the same name, `.json`).

    Args:
      run: what the seconds are valid for, by name, to write with the stages.
    """
    draw_iteration(stages).savefig(path)
    content = json.dumps({**asdict(stages), **run})
    path.with_suffix(".json").write_text(content + "\n", encoding="utf-8")


def draw_iteration(stages: IterationStages) -> "Figure":
    """Draws a row for each group of devices. A stage has the rows of its devices."""
    from matplotlib.patches import Patch

    from pat_jax.common.picture import Picture

    figure = Picture(9.0, 1.2 + 0.5 * len(stages.groups))
    axes = figure.add_subplot()
    for row, group in enumerate(stages.groups):
        for span in stages.spans:
            if {*group} <= {*span.devices}:
                bar = [(span.begin_s, span.end_s - span.begin_s)]
                axes.broken_barh(bar, (row - 0.4, 0.8), color=colour(KINDS.index(span.kind)))
    axes.set_yticks(range(len(stages.groups)), [f"devices {in_ranges(x)}" for x in stages.groups])
    axes.set_ylim(len(stages.groups) - 0.5, -0.5)
    axes.set_xlim(0, max((x.end_s for x in stages.spans), default=1.0))
    axes.set_xlabel(f"seconds of iteration {stages.step}")
    kinds = [kind for kind in KINDS if any(x.kind == kind for x in stages.spans)]
    handles = [Patch(color=colour(KINDS.index(kind)), label=kind) for kind in kinds]
    figure.legend(handles=handles, loc="outside upper left", ncols=len(kinds), frameon=False)
    return figure


if TYPE_CHECKING:
    from matplotlib.figure import Figure
