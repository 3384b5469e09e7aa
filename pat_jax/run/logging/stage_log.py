"""The stages of each iteration in the log, and a picture of the last one."""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

from pat_jax.common.devices import Device
from pat_jax.common.hosts.owners import owners
from pat_jax.common.hosts.together import process_group
from pat_jax.common.timeline import Span, Timeline
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
        if places.is_split:
            spans = _of_all_processes(spans, places.devices)
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


def _of_all_processes(spans: Sequence[Span], devices: Sequence[Device]) -> list[Span]:
    """Returns the stages of all processes, each as the first owner of its devices has timed it.

    The processes have begun their timelines when they last told each other something.
    """
    us, place = process_group(), {device: i for i, device in enumerate(devices)}
    own = [
        (x.name, [place[device] for device in x.devices], x.begin_s, x.end_s)
        for x in spans
        if owners(x.devices)[0] == us.index
    ]
    every = [
        Span(name, frozenset(devices[i] for i in places), *seconds)
        for told in us.gather("stages", own)
        for name, places, *seconds in told
    ]
    return sorted(every, key=lambda span: span.begin_s)


def _described(setup: Setup) -> dict[str, object]:
    """Returns what a plan compares before it uses the seconds (`capacity/measured_iteration.py`)."""
    hosts = len({*hosts_of(setup.devices)})
    return {"subject": asdict(setup.subject), "hosts": hosts, "rest": setup.config.roles.rest}
