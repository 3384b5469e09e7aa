"""The seconds of each iteration's stages, in the log."""

import logging
from collections.abc import Mapping, Sequence

from pat_jax.common.hosts.together import process_group
from pat_jax.common.owners import owners
from pat_jax.common.timeline import Span, Timeline
from pat_jax.run.roles.places import Places

LEAST = 1e-3  # share of an iteration that a part of a stage must take to be counted
log = logging.getLogger(__name__)


def log_stages(timeline: Timeline, places: Places, step: int) -> Mapping[str, float]:
    """Logs the stages since the last call, those of iteration `step`. Returns the seconds by the
    name of the stage, summed over its parts. Parts below `LEAST` are left out."""
    spans = timeline.take()
    if places.is_split:
        spans = _of_all_processes(spans, places)
    begin = min((span.begin_s for span in spans), default=0.0)
    whole = max((span.end_s for span in spans), default=0.0) - begin
    seconds: dict[str, float] = {}
    for span in spans:
        if (taken := span.end_s - span.begin_s) >= LEAST * whole:
            seconds[span.name] = seconds.get(span.name, 0.0) + taken
    stages = ", ".join(f"{name} {taken:.3g} s" for name, taken in seconds.items())
    log.info("step %d: %s", step, stages)
    return seconds


def _of_all_processes(spans: Sequence[Span], places: Places) -> list[Span]:
    """Returns the stages of all processes, each as the first owner of its devices has timed it.

    Timelines begin when the processes last exchanged something, so they agree.
    """
    us = process_group()
    devices = places.devices
    place = {device: i for i, device in enumerate(devices)}
    own = [
        (x.name, [place[device] for device in x.devices], x.begin_s, x.end_s)
        for x in spans
        if owners(x.devices)[0] == us.index
    ]
    every = [
        Span(name, frozenset(devices[i] for i in positions), begin_s, end_s)
        for told in us.gather("stages", own)
        for name, positions, begin_s, end_s in told
    ]
    return sorted(every, key=lambda span: span.begin_s)
