"""A rollout over time, as a chart of an HTML page: running sequences above bands of layouts."""

from collections.abc import Iterator, Sequence
from itertools import groupby

import numpy as np

from pat_jax.common.html.charts import Axis, Band, Line, Plot
from pat_jax.common.picture_style import COMPUTED, colour, layout_colour
from pat_jax.engine.record.trace import RolloutTrace


def running_plot(trace: RolloutTrace) -> Plot:
    edges = [*trace.times_s, trace.total_s]
    at, running = running_curve(trace, edges)
    bands = [Band("prefill", 0, edges[0], colour(6))] if edges[0] > 0 else []
    bands += [Band(*each, layout_colour(each[0])) for each in layout_runs(trace, edges)]
    return Plot(
        [Line("", [*zip(at, running, strict=True)], "currentColor", is_step=True)],
        across=Axis.over(edges),
        up=Axis.over(running),
        across_words="seconds since the rollout began",
        up_words="running sequences, and the layout in force",
        bands=bands,
        marks=[switch.at_s for switch in trace.switches],
        note=COMPUTED if trace.is_computed else "",
    )


def layout_runs(trace: RolloutTrace, edges: Sequence[float]) -> Iterator[tuple[str, float, float]]:
    """Yields each run of bursts in one layout: its name, start and end."""
    start = 0
    for layout, bursts in groupby(trace.layout):
        stop = start + len(list(bursts))
        yield layout, edges[start], edges[stop]
        start = stop


def running_curve(trace: RolloutTrace, edges: list[float]) -> tuple[list[float], list[int]]:
    """Returns where the number of running sequences changes, and its value from there on.

    Args:
      edges: the start of each burst and the end of the last, in seconds or decode steps.
    """
    if not trace.done_after:
        return edges, [*trace.running, 0]
    num_running = len(trace.done_after)
    ends = np.interp(trace.done_after, [*trace.steps, trace.total_steps], edges)
    return [edges[0], *ends.tolist()], list(range(num_running, -1, -1))
