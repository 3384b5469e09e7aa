"""A picture of one rollout over time: charts of running sequences and of draft tokens, and words.

Running sequences are drawn above bands of layouts. Knows `RolloutTrace`.
"""

from collections.abc import Iterator, Sequence
from itertools import groupby
from pathlib import Path

import numpy as np

from pat_jax.common.files import replace_text
from pat_jax.common.html.charts import (
    COMPUTED,
    Axis,
    Band,
    Line,
    Plot,
    Points,
    colour,
    layout_colour,
)
from pat_jax.common.html.figure import Figure
from pat_jax.engine.record.trace import DraftTrace, Move, RolloutTrace

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
MOST_TOLD = 12  # most switches described under the picture; its .json file has all


def running_plot(trace: RolloutTrace, title: str = "") -> Plot:
    """Returns a chart of running sequences, over bands of the layouts."""
    edges = [*trace.times_s, trace.total_s]
    at, running = running_curve(trace, edges)
    bands = [Band("prefill", 0, edges[0], PREFILL)] if edges[0] > 0 else []
    for layout, begin, end in layout_runs(trace, edges):
        bands.append(Band(layout, begin, end, layout_colour(layout)))
    bands += [Band("", x.at_s, x.at_s + x.seconds, INK, MOVING) for x in trace.switches]
    points = [(edges[0], 0.0), *zip(at, running, strict=True)]
    return Plot(
        [Line("", points, INK, is_step=True, is_filled=True)],
        across=Axis.over(edges),
        up=Axis.over([HEADROOM * max(running)]),
        across_words=SECONDS,
        up_words="running sequences, and the layout in force",
        bands=bands,
        marks=[switch.at_s for switch in trace.switches],
        note=COMPUTED if trace.is_computed else "",
        title=title,
    )


def draft_plots(trace: RolloutTrace) -> Iterator[Plot]:
    """Yields a chart of the tokens of a sequence per decode step, over seconds.
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
        across=Axis.over(edges),
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


def plot_rollout(trace: RolloutTrace, path: str | Path) -> None:
    """Writes the picture to `path` (SVG) and the trace beside it (the same name, `.json`).

    Args:
      trace: the rollout.
      path: path of the picture; its folder is made if missing.
    """
    path = Path(path)
    draw_rollout(trace).save(path)
    replace_text(path.with_suffix(".json"), trace.to_json() + "\n")


def draw_rollout(trace: RolloutTrace) -> Figure:
    switches = len(trace.switches)
    title = (
        f"{max(trace.running, default=0):,} responses in {_seconds(trace.total_s)}: "
        f"{trace.total_steps:,} decode steps, {switches} switch{'' if switches == 1 else 'es'}"
    )
    return Figure([running_plot(trace, title), *draft_plots(trace)], told=[*_told(trace)])


def _draft_words(drafts: DraftTrace) -> str:
    *sources, _ = SOURCES
    counts = {name: sum(of) for name, of in accepted_by_source(drafts).items() if name in sources}
    parts = ", ".join(f"{name} {count:,}" for name, count in counts.items())
    text = f"drafts: {sum(drafts.drafted):,} tokens drafted, {sum(drafts.accepted):,} accepted"
    text += f" ({parts})" if parts else ""
    if drafts.saving_s is None or drafts.predicted_saving_s is None:
        return text
    return (
        f"{text}; saved {_seconds(drafts.saving_s)} "
        f"(predicted {_seconds(drafts.predicted_saving_s)})"
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
