"""The stages of each iteration in the log, and a picture of the last one."""

import logging
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path

from pat_jax.common.timeline import Timeline
from pat_jax.layout.mesh import hosts_of
from pat_jax.planning import stage_names
from pat_jax.run.logging.iteration_picture import IterationStages, plot_iteration
from pat_jax.run.setup import Setup

PICTURE_FILE = "iteration.png"
log = logging.getLogger(__name__)


class StageLog:
    def __init__(self, timeline: Timeline, setup: Setup, predicted_s: Mapping[str, float]):
        """`predicted_s` are seconds of each stage; empty if they were not predicted."""
        self._timeline, self._setup, self._predicted_s = timeline, setup, predicted_s
        self._last: IterationStages | None = None

    def note(self, step: int, tokens: int) -> None:
        """Logs the stages since the last call, those of iteration `step`, whose passes read
        `tokens` tokens."""
        spans, places = self._timeline.take(), self._setup.places
        made_of = places.devices, places.groups(), self._predicted_s, tokens
        stages = IterationStages.of(step, spans, *made_of)
        # The last update of a run with `--placement.lag 1` has no rollout beside it.
        if self._last is None or any(x.name == stage_names.ROLLOUT for x in spans):
            self._last = stages
        log.info("step %d: %s", step, stages.described())

    def draw(self, folder: Path) -> None:
        """Draws the last iteration that has a rollout, with its stages as JSON, into a folder."""
        if self._last is not None and self._last.spans:
            plot_iteration(self._last, folder / PICTURE_FILE, _described(self._setup))


def _described(setup: Setup) -> dict[str, object]:
    """Returns what a plan compares before it uses the seconds (`capacity/measured_iteration.py`)."""
    hosts = len({*hosts_of(setup.devices)})
    return {"subject": asdict(setup.subject), "hosts": hosts, "rest": setup.config.roles.rest}
