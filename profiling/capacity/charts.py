"""The charts of a plan's page, by value."""

from collections.abc import Iterator
from statistics import fmean

from pat_jax.common.html.charts import Axis, Bar, Bars, Line, Plot
from pat_jax.common.picture_style import COMPUTED, colour, tp_colour
from pat_jax.common.text_table import shown
from pat_jax.planning.memory import GIB
from pat_jax.profiling.capacity.report import PlanReport
from pat_jax.profiling.capacity.tables import stage_seconds
from pat_jax.profiling.capacity.update_report import Update


def rollouts(report: PlanReport) -> Bars:
    bars = []
    for x in report.comparison.systems:
        parts = {"prefill": x.prefill_s, "decoding": x.decode_s, "moves": x.switch_s}
        means = {name: fmean(seconds) for name, seconds in parts.items()}
        bars.append(Bar(x.name, means, f"{shown(x.mean_s)} s"))
    return Bars(bars)


def iterations(report: PlanReport, update: Update) -> Bars:
    stages = {name: seconds.total for name, seconds in stage_seconds(update).items()}
    bars = [
        Bar(each.name, {"rollout": each.rollout_s, **stages}, f"{shown(each.total_s)} s")
        for each in report.iterations
    ]
    return Bars(bars)


def memory(report: PlanReport) -> Bars:
    bars = []
    for layout in report.memory.layouts:
        parts = {"weights": layout.weights, "optimizer and master weights": layout.optimizer}
        parts |= {"KV cache": layout.kv_cache}
        parts |= {"drafts": layout.drafts} if layout.drafts else {}
        parts |= {"programs": layout.programs} if report.programs else {}
        words = shown(layout.total / GIB) + ("" if layout.is_used else ", not used")
        bars.append(Bar(str(layout.split), {k: n / GIB for k, n in parts.items()}, words))
    return Bars(bars, report.memory.limit / GIB)


def steps(report: PlanReport) -> Iterator[Plot]:
    times = report.steps
    known = [1e3 * s for table in times.seconds for line in table for s in line if s is not None]
    up, across = Axis.over(known, is_log=True), Axis.over(times.running, is_log=True)
    for context, table in zip(times.contexts, times.seconds, strict=True):
        lines = []
        for i, split in enumerate(times.splits):
            found = [(n, line[i]) for n, line in zip(times.running, table, strict=True)]
            points = [(n, 1e3 * s) for n, s in found if s is not None]
            lines += [Line(str(split), points, tp_colour(split.tp))] if points else []
        yield Plot(
            lines,
            across=across,
            up=up,
            across_words="running sequences, evenly over the replicas",
            up_words=f"ms, contexts of {context:,} tokens",
            note=COMPUTED if times.source != "profile" else "by a measured profile",
        )


def lengths(report: PlanReport) -> Plot:
    points = [(tokens, 100 * (1 - p)) for p, tokens in report.lengths.quantiles]
    return Plot(
        [Line("", points, colour(0))],
        across=Axis.over([tokens for tokens, _ in points]),
        up=Axis(0, 100),
        across_words="tokens",
        up_words="% of responses that are longer",
        note=report.lengths.source,
    )
