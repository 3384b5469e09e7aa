"""The stages of each iteration in the log, and a picture of the last one."""

import logging
from collections.abc import Mapping
from pathlib import Path

from pat_jax.common.timeline import Timeline
from pat_jax.planning import stage_names
from pat_jax.run.logging.iteration_picture import IterationStages, plot_iteration
from pat_jax.run.start.places import Places

PICTURE_FILE = "iteration.png"
log = logging.getLogger(__name__)


class StageLog:
    def __init__(self, timeline: Timeline, places: Places, predicted_s: Mapping[str, float]):
        """`predicted_s` are seconds of each stage; empty if they were not predicted."""
        self._timeline, self._places, self._predicted_s = timeline, places, predicted_s
        self._last: IterationStages | None = None

    def note(self, step: int) -> None:
        """Logs the stages since the last call, those of iteration `step`."""
        spans, groups = self._timeline.take(), self._places.groups()
        made_of = self._places.devices, groups, self._predicted_s
        stages = IterationStages.of(step, spans, *made_of)
        # The last update of a run with `--placement.lag 1` has no rollout beside it.
        if self._last is None or any(x.name == stage_names.ROLLOUT for x in spans):
            self._last = stages
        log.info("step %d: %s", step, stages.described())

    def draw(self, folder: Path) -> None:
        """Draws the last iteration that has a rollout, with its stages as JSON, into a folder."""
        if self._last is not None and self._last.spans:
            plot_iteration(self._last, folder / PICTURE_FILE)
