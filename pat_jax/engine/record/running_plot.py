"""A rollout over time, as charts: running sequences above bands of layouts, and draft tokens."""

from collections.abc import Iterator, Sequence
from itertools import groupby

import numpy as np

from pat_jax.common.html.charts import Axis, Band, Line, Plot, Points
from pat_jax.common.picture_style import COMPUTED, colour, layout_colour
from pat_jax.engine.record.trace import DraftTrace, RolloutTrace

HEADROOM = 1.4  # height of the chart over that of the curve: the names of the layouts are above
SECONDS = "seconds since the rollout began"
INK = "currentColor"
PREFILL = colour(6)
MOVING = 0.45  # opacity of the band over the seconds that a switch took
# Sources of accepted draft tokens: those of `draft_counts.SOURCES`, then drafts of other drafters.
SOURCES = {
    "own text": "#b8651b",
    "siblings": "#3f9b8f",
    "earlier responses": "#7a5ea8",
    "drafts": "#b4232c",
}


def running_plot(trace: RolloutTrace, title: str = "", until_s: float = 0.0) -> Plot:
    """Returns a chart of running sequences, over bands of the layouts, for at least `until_s` s."""
    edges = [*trace.times_s, trace.total_s]
    at, running = running_curve(trace, edges)
    bands = [Band("prefill", 0, edges[0], PREFILL)] if edges[0] > 0 else []
    for layout, begin, end in layout_runs(trace, edges):
        bands.append(Band(layout, begin, end, layout_colour(layout)))
    bands += [Band("", x.at_s, x.at_s + x.seconds, INK, MOVING) for x in trace.switches]
    points = [(edges[0], 0.0), *zip(at, running, strict=True)]
    return Plot(
        [Line("", points, INK, is_step=True, is_filled=True)],
        across=Axis.over([*edges, until_s]),
        up=Axis.over([HEADROOM * max(running)]),
        across_words=SECONDS,
        up_words="running sequences, and the layout in force",
        bands=bands,
        marks=[switch.at_s for switch in trace.switches],
        note=COMPUTED if trace.is_computed else "",
        title=title,
    )


def draft_plots(trace: RolloutTrace, until_s: float) -> Iterator[Plot]:
    """Yields a chart of the tokens of a sequence per decode step, over at least `until_s` seconds.
    Above one token it shows accepted draft tokens by source. Yields nothing if there were none."""
    drafts = trace.drafts
    edges = [*trace.times_s, trace.total_s]
    if max(drafts.tokens_per_step, default=1.0) <= 1.0:
        return
    per_step = [*drafts.tokens_per_step, drafts.tokens_per_step[-1]]
    low = np.ones(len(per_step))
    lines = list[Line]()
    for name, counts in accepted_by_source(drafts).items():
        part = np.array(counts) / np.maximum(drafts.accepted, 1) * (np.array(per_step[:-1]) - 1)
        high = low + np.append(part, part[-1])
        points = [*zip(edges, high.tolist(), strict=True)]
        between = stairs(edges, low.tolist(), high.tolist())
        lines.append(Line(name, points, SOURCES[name], is_step=True, interval=between))
        low = high
    total = Line("", [*zip(edges, per_step, strict=True)], INK, is_step=True)
    yield Plot(
        [*lines, total],
        across=Axis.over([*edges, until_s]),
        up=Axis.over(per_step),
        across_words=SECONDS,
        up_words="tokens of a sequence in a decode step",
        note="",
    )


def accepted_by_source(drafts: DraftTrace) -> dict[str, list[int]]:
    """Returns the accepted draft tokens of each burst by source, without sources that had none."""
    *copied, others = SOURCES
    known = {name: [burst[i][1] for burst in drafts.by_source] for i, name in enumerate(copied)}
    rest = [all_of - sum(of) for all_of, *of in zip(drafts.accepted, *known.values(), strict=True)]
    return {name: counts for name, counts in (known | {others: rest}).items() if any(counts)}


def stairs(at: Sequence[float], low: Sequence[float], high: Sequence[float]) -> Points:
    """Returns the corners of the area between two step functions, for `Line.interval`."""
    edges = [*zip(at, at[1:], low, high, strict=False)]
    return [(x, below, above) for *ends, below, above in edges for x in ends]


def layout_runs(trace: RolloutTrace, edges: Sequence[float]) -> Iterator[tuple[str, float, float]]:
    """Yields the layout of each run of bursts in one layout, and the run's start and end."""
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
