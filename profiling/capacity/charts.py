"""The charts and tables of a plan's page, one function for each."""

from collections.abc import Iterator
from dataclasses import fields

from pat_jax.common.html.bars import Bar, Segment, bars
from pat_jax.common.html.layouts import live_plot
from pat_jax.common.html.page import panels
from pat_jax.common.html.plots import Axis, Line, plot
from pat_jax.common.picture_style import COMPUTED, colour, tp_colour
from pat_jax.common.text_table import Table, percent, shown
from pat_jax.planning.memory import GIB
from pat_jax.profiling.capacity.report import Iteration, PlanReport
from pat_jax.profiling.capacity.update_report import Update, UpdateMemory
from pat_jax.profiling.capacity.update_tables import memory_parts, stages
from pat_jax.profiling.predict.update_times import Seconds
from pat_jax.profiling.simulate.comparison import System


def time_bar(system: System) -> Bar:
    count = len(system.total_s)
    parts = (
        ("prefill", sum(system.prefill_s), colour(4)),
        ("decoding", sum(system.decode_s), colour(0)),
        ("switches", sum(system.switch_s), colour(1)),
    )
    segments = [Segment(name, seconds / count, c) for name, seconds, c in parts]
    return Bar(system.name, segments, f"{shown(system.mean_s)} s")


def iteration_bar(iteration: Iteration, update: Update) -> Bar:
    parts = [("rollout", iteration.rollout_s), *((n, s.total) for n, s in stages(update))]
    segments = [Segment(name, seconds, colour(i)) for i, (name, seconds) in enumerate(parts)]
    return Bar(iteration.name, segments, f"{shown(iteration.total_s)} s")


def update_bar(update: Update) -> Bar:
    """Where the seconds of the update go."""
    every = sum((seconds for _, seconds in stages(update)), Seconds())
    parts = [(field.name, getattr(every, field.name)) for field in fields(every)]
    segments = [Segment(name, seconds, colour(i)) for i, (name, seconds) in enumerate(parts)]
    return Bar("update", segments, f"{shown(every.total)} s")


def update_memory_bar(memory: UpdateMemory) -> str:
    parts = [(name, size / GIB) for name, size in memory_parts(memory)]
    segments = [Segment(name, size, colour(i)) for i, (name, size) in enumerate(parts) if size]
    bar = Bar("update", segments, f"{memory.total / GIB:.3g}")
    limit = memory.limit / GIB
    return bars([bar], limit=limit, limit_words=f"a device has {limit:.3g}")


def trace_plot(report: PlanReport) -> str:
    """Live sequences over time, and the layout in force."""
    trace = report.comparison.traces[0]
    edges = [*trace.times_s, trace.total_s]
    live = [*zip(edges, [*trace.live, 0], strict=True)]
    return live_plot(live, edges, trace.layout, [switch.at_s for switch in trace.switches])


def memory_bars(report: PlanReport) -> str:
    rows = []
    for layout in report.memory.layouts:
        parts = (
            ("weights", layout.weights),
            ("optimizer and master weights", layout.optimizer),
            ("KV cache", layout.kv_cache),
            *[("drafts", layout.drafts)] * (layout.drafts > 0),
            *[("programs", layout.programs)] * bool(report.programs),
        )
        segments = [Segment(name, n / GIB, colour(i)) for i, (name, n) in enumerate(parts)]
        words = f"{layout.total / GIB:.3g}" + ("" if layout.is_used else ", not used")
        rows.append(Bar(str(layout.split), segments, words))
    limit = report.memory.limit / GIB
    return bars(rows, limit=limit, limit_words=f"a device has {limit:.3g}")


def step_plots(report: PlanReport) -> Iterator[str]:
    steps = report.steps
    known = [1e3 * s for table in steps.seconds for line in table for s in line if s is not None]
    up, across = Axis.over(known, is_log=True), Axis.over(steps.live, is_log=True)
    drawn = []
    for context, table in zip(steps.contexts, steps.seconds, strict=True):
        lines = []
        for i, split in enumerate(steps.splits):
            found = [(n, line[i]) for n, line in zip(steps.live, table, strict=True)]
            points = [(n, 1e3 * s) for n, s in found if s is not None]
            lines += [Line(str(split), points, tp_colour(split.tp))] if points else []
        drawn.append(
            plot(
                lines,
                across=across,
                up=up,
                across_words="live sequences, evenly over the groups",
                up_words=f"ms, contexts of {context:,} tokens",
                note=COMPUTED if steps.source != "profile" else "by a measured profile",
            )
        )
    yield panels(drawn)


def step_table(report: PlanReport) -> Table:
    steps = report.steps
    rows = [
        [context, live, *(None if s is None else 1e3 * s for s in line)]
        for context, table in zip(steps.contexts, steps.seconds, strict=True)
        for live, line in zip(steps.live, table, strict=True)
    ]
    return Table(["context", "live", *(f"{split} ms" for split in steps.splits)], rows)


def program_table(report: PlanReport) -> Table:
    header = ["program", "rows", "length", "arguments GiB", "temporary GiB", "Gflop", "compiled s"]
    rows = [
        [
            f"{program}" + (f": {program.error}" if program.error else ""),
            program.rows,
            program.length,
            program.argument_bytes / GIB,
            program.temp_bytes / GIB,
            program.flops / 1e9,
            program.compile_s,
        ]
        for program in report.programs
    ]
    return Table(header, rows)


def length_plot(report: PlanReport) -> str:
    lengths = report.lengths
    points = [(tokens, 100 * (1 - p)) for p, tokens in lengths.quantiles]
    drawn = plot(
        [Line("", points, colour(0))],
        across=Axis.over([tokens for tokens, _ in points]),
        up=Axis(0, 100),
        across_words="tokens",
        up_words="% of responses that are longer",
        note=lengths.source,
    )
    return (
        f"{drawn}<p>Mean {lengths.mean:,.0f} tokens; {percent(lengths.share_cut)} are cut at the cap. "
        f"{lengths.samples_per_prompt} samples of a prompt, their scores correlated by "
        f"{lengths.correlation:g}.</p>"
    )
