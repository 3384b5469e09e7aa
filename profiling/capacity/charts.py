"""The charts and tables of a plan's page, one function for each."""

from collections.abc import Iterable, Iterator, Sequence
from html import escape
from itertools import groupby

from pat_jax.common.text_table import Cell, percent, shown
from pat_jax.planning.memory import GIB
from pat_jax.profiling.capacity.page_charts import (
    Axis,
    Band,
    Bar,
    Line,
    Segment,
    bars,
    colour,
    legend,
    plot,
)
from pat_jax.profiling.capacity.report import SOURCES, PlanReport
from pat_jax.profiling.capacity.text import decode_collectives
from pat_jax.profiling.simulate.comparison import System


def systems(report: PlanReport) -> Sequence[System]:
    return report.comparison.adaptive, *report.comparison.static


def time_bar(system: System) -> Bar:
    count = len(system.total_s)
    parts = (
        ("prefill", sum(system.prefill_s), colour(4)),
        ("decoding", sum(system.decode_s), colour(0)),
        ("switches", sum(system.switch_s), colour(1)),
    )
    segments = [Segment(name, seconds / count, c) for name, seconds, c in parts]
    return Bar(system.name, segments, f"{shown(system.mean_s)} s")


def time_row(report: PlanReport, system: System) -> list[Cell]:
    found, count = report.comparison, len(system.total_s)
    return [
        system.name,
        system.mean_s,
        sum(system.prefill_s) / count,
        sum(system.switch_s) / count,
        sum(system.num_preempted),
        "" if system is found.adaptive else percent(found.gain(system)),
    ]


def trace_plot(report: PlanReport) -> str:
    """Live sequences over time, and the layout in force."""
    trace, names = report.comparison.traces[0], [str(split) for split in report.steps.splits]
    edges = [*trace.times_s, trace.total_s]
    bands, start = [], 0
    for layout, bursts in groupby(trace.layout):
        stop = start + len(list(bursts))
        left, right = edges[start], edges[stop]
        bands.append(Band(layout, left, right, colour(names.index(layout))))
        start = stop
    points = [*zip(trace.times_s, trace.live, strict=True), (trace.total_s, 0)]
    line = Line("", points, "currentColor", is_step=True)
    drawn = plot(
        [line],
        across=Axis.over(edges),
        up=Axis.over(trace.live),
        across_words="seconds since the rollout began",
        up_words="live sequences, and the layout in force",
        bands=bands,
        marks=[switch.at_s for switch in trace.switches],
    )
    return drawn + legend([(n, colour(i)) for i, n in enumerate(names) if n in trace.layout])


def switch_table(report: PlanReport) -> Iterator[str]:
    trace = report.comparison.traces[0]
    if trace.switches:
        rows: list[list[Cell]] = [
            [
                f"{switch.source} → {switch.target}",
                switch.at_s,
                switch.live,
                switch.seconds,
                switch.predicted_saving_s,
                switch.kv,
            ]
            for switch in trace.switches
        ]
        header = ["switch", "at s", "live", "takes s", "expected to save s", "KV cache"]
        yield table(header, rows)


def memory_bars(report: PlanReport) -> str:
    rows = []
    for layout in report.memory.layouts:
        parts = (
            ("weights", layout.weights),
            ("optimizer and master weights", layout.optimizer),
            ("KV cache", layout.kv_cache),
            *[("programs", layout.programs)] * bool(report.programs),
        )
        segments = [Segment(name, n / GIB, colour(i)) for i, (name, n) in enumerate(parts)]
        words = f"{layout.total / GIB:.3g}" + ("" if layout.is_used else ", not used")
        rows.append(Bar(str(layout.split), segments, words))
    limit = report.memory.limit / GIB
    return bars(rows, limit=limit, limit_words=f"a device has {limit:.3g}")


def memory_table(report: PlanReport) -> str:
    header = ["layout", "weights", "optimizer", "KV cache", "programs", "all", "whole", ""]
    rows: list[list[Cell]] = [
        [
            str(layout.split),
            *(n / GIB for n in (layout.weights, layout.optimizer, layout.kv_cache)),
            layout.programs / GIB if report.programs else None,
            layout.total / GIB,
            layout.whole,
            "fits" if layout.is_used else "not used",
        ]
        for layout in report.memory.layouts
    ]
    refused = [f"{x.split}: {x.refusal}" for x in report.memory.layouts if x.refusal]
    programs = f" Programs: {SOURCES['compiler']}." if report.programs else ""
    return (
        table(header, rows)
        + listed([*refused, *report.memory.undivided])
        + f'<p class="source">Whole: sequences that find pages at full length. Figures: {SOURCES["arithmetic"]}.'
        f"{programs}</p>"
    )


def training_words(report: PlanReport) -> Iterator[str]:
    if report.memory.training:
        fits = "fits" if report.memory.training <= report.memory.limit else "does not fit"
        yield (
            f"<p>The training step takes {report.memory.training / GIB:.3g} GiB of a device at most: it "
            f"{fits}.</p>"
        )


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
            lines += [Line(str(split), points, colour(i))] if points else []
        drawn.append(
            plot(
                lines,
                across=across,
                up=up,
                across_words="live sequences, evenly over the groups",
                up_words=f"ms, contexts of {context:,} tokens",
            )
        )
    yield f'<div class="panels">{"".join(drawn)}</div>'


def step_table(report: PlanReport) -> str:
    steps = report.steps
    rows: list[list[Cell]] = [
        [context, live, *(None if s is None else 1e3 * s for s in line)]
        for context, table in zip(steps.contexts, steps.seconds, strict=True)
        for live, line in zip(steps.live, table, strict=True)
    ]
    return table(["context", "live", *(f"{split} ms" for split in steps.splits)], rows)


def sent_rows(report: PlanReport) -> list[list[Cell]]:
    return [
        [str(program.split), *cells]
        for program in report.programs
        if program.name == "decode" and not program.error
        for cells in decode_collectives(program)
    ]


def program_table(report: PlanReport) -> str:
    header = ["program", "rows", "length", "arguments GiB", "temporary GiB", "Gflop", "compiled s"]
    rows: list[list[Cell]] = [
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
    return table(header, rows)


def depth_words(report: PlanReport) -> str:
    shallow = next((program for program in report.programs if program.is_extrapolated), None)
    if shallow is None:
        return "The whole model was compiled."
    depths = " and ".join(map(str, shallow.compiled_layers))
    return (
        f"Compiled with {depths} layers and taken to {shallow.layers}: every number is affine in the "
        "layers."
    )


def length_plot(report: PlanReport) -> str:
    lengths = report.lengths
    points = [(tokens, 100 * (1 - p)) for p, tokens in lengths.quantiles]
    drawn = plot(
        [Line("", points, colour(0))],
        across=Axis.over([tokens for tokens, _ in points]),
        up=Axis(0, 100),
        across_words="tokens",
        up_words="% of responses that are longer",
    )
    return (
        f"{drawn}<p>Mean {lengths.mean:,.0f} tokens; {percent(lengths.share_cut)} are cut at the cap. "
        f"{lengths.samples_per_prompt} samples of a prompt, their scores correlated by "
        f"{lengths.correlation:g}.</p>"
    )


def listed(lines: Iterable[str]) -> str:
    """An HTML list; empty where there are no lines."""
    told = "".join(f"<li>{escape(line)}</li>" for line in lines)
    return f"<ul>{told}</ul>" if told else ""


def details(title: str, content: str) -> str:
    return f"<details><summary>{escape(title)}</summary>{content}</details>"


def table(header: Sequence[str], rows: Sequence[Sequence[Cell]]) -> str:
    def cell(value: Cell) -> str:
        kind = "" if isinstance(value, str) else ' class="n"'
        return f"<td{kind}>{escape(shown(value))}</td>"

    head = "".join(f"<th>{escape(name)}</th>" for name in header)
    body = "".join(f"<tr>{''.join(map(cell, row))}</tr>" for row in rows)
    return f'<div class="wide"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'
