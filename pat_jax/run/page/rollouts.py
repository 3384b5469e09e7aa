"""Rollouts of a run's page: what each did over time, its switches as predicted and as they went."""

from collections.abc import Iterator, Mapping
from html import escape

from pat_jax.common.html.layouts import live_plot
from pat_jax.common.html.page import html_table, section
from pat_jax.common.picture_style import COMPUTED
from pat_jax.common.text_table import Cell, Table, percent, shown
from pat_jax.engine.trace import RolloutTrace
from pat_jax.run.curves import Rows
from pat_jax.run.page.curves import numbers
from pat_jax.run.plot import live_curve
from pat_jax.run.rollouts import KeptRollout

MIB = 2**20


def rollouts(kept: Mapping[str, KeptRollout], rows: Rows) -> str:
    """One that is the first and the slowest is shown once; empty before the first."""
    by_step: dict[int, list[str]] = {}
    for name, one in kept.items():
        by_step.setdefault(one.step, []).append(name)
    shown_once = {names[0]: " and ".join(names) for names in by_step.values()}
    parts = [
        part
        for name, title in shown_once.items()
        for part in _rollout(
            title, kept[name], [row for row in rows if row["step"] == kept[name].step]
        )
    ]
    return section("Rollouts", *parts) if parts else ""


def rollout_plot(trace: RolloutTrace) -> str:
    """Live requests over time, above the layouts in force."""
    edges = [*trace.times_s, trace.total_s]
    return live_plot(
        [*zip(*live_curve(trace, edges), strict=True)],
        edges,
        trace.layout,
        [switch.at_s for switch in trace.switches],
        note=COMPUTED if trace.is_computed else "",
    )


def _rollout(title: str, one: KeptRollout, row: Rows) -> Iterator[str]:
    trace = one.trace
    yield f"<h3>The {escape(title)}: step {one.step}</h3><p>{escape(_words(trace, row))}</p>"
    yield rollout_plot(trace)
    if trace.switches:
        yield html_table(_switches(trace))


def _words(trace: RolloutTrace, row: Rows) -> str:
    count = len(trace.switches)
    told = (
        f"{max(trace.live):,} responses in {shown(trace.total_s)} s and {trace.total_steps:,} "
        f"decode steps, {count} switch{'' if count == 1 else 'es'}."
    )
    for regret in numbers(row, "rollout/regret"):
        told += (
            f" Regret {percent(regret)}: by the planner's own prices, what its path took over the best "
            "one in hindsight."
        )
    return told


def _switches(trace: RolloutTrace) -> Table:
    header = ["at s", "switch", "live", "took s (predicted)", "to the end s (predicted)"]
    header += ["had it stayed s, predicted", "KV cache", "moved MiB"]
    rows: list[list[Cell]] = [
        [
            each.at_s,
            f"{each.source} to {each.target}",
            each.live,
            _beside(each.seconds, each.predicted_cost_s),
            _beside(trace.total_s - each.at_s, each.predicted_remaining_s),
            each.predicted_stay_s if each.predicted_remaining_s else None,
            each.kv,
            None if each.bytes_moved is None else each.bytes_moved / MIB,
        ]
        for each in trace.switches
    ]
    return Table(header, rows)


def _beside(actual: float, predicted: float) -> str:
    """Nothing is predicted of a scripted switch."""
    return f"{shown(actual)} ({shown(predicted)})" if predicted else shown(actual)
