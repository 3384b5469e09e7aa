"""A plan as one HTML file: everything in it, readable offline and at any width, light or dark."""

from collections.abc import Iterator, Sequence
from html import escape
from itertools import groupby
from pathlib import Path

from pat_jax.engine.trace import RolloutTrace
from pat_jax.files import replace_text
from pat_jax.planning.memory import GIB
from pat_jax.profiling.comparison import System
from pat_jax.profiling.limits import WORDS, shares
from pat_jax.profiling.page_charts import (
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
from pat_jax.profiling.plan_report import SOURCES, PlanReport
from pat_jax.profiling.plan_text import decode_collectives
from pat_jax.profiling.text_table import Cell, percent, shown

STYLE = Path(__file__).with_name("plan_page.css")


def write_page(report: PlanReport, path: Path) -> None:
    replace_text(path, page(report))


def page(report: PlanReport) -> str:
    subject = report.subject
    title = f"{subject.model} on {subject.target}"
    sections = [
        _answer(report),
        *_sections(report),
        _limits(report),
        _sources(report),
    ]
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)}: a plan by pat_jax</title>"
        f"<style>{STYLE.read_text(encoding='utf-8')}</style></head><body><main>"
        f"<header><p>Plan before you rent</p><h1>{escape(title)}</h1>"
        f"<p>{_workload(report)}</p></header>{''.join(sections)}</main></body></html>\n"
    )


def _workload(report: PlanReport) -> str:
    subject = report.subject
    return escape(
        f"{subject.num_devices} × {subject.chip['name']}, {subject.dtype}; a rollout of "
        f"{subject.sequences:,} responses of up to {subject.cap:,} tokens. Computed before any of "
        "these devices was there: nothing ran."
    )


def _section(title: str, *content: str, source: str = "") -> str:
    """`source` says where the figures are from."""
    told = f'<p class="source">{escape(source)}</p>' if source else ""
    return f"<section><h2>{escape(title)}</h2>{''.join(content)}{told}</section>"


def _answer(report: PlanReport) -> str:
    """The few numbers that were asked for."""
    found, memory = report.comparison, report.memory
    best = found.best_static
    used = [layout for layout in memory.layouts if layout.is_used]
    tiles = [
        (
            f"{found.adaptive.mean_s:,.0f} s"
            if found.adaptive.mean_s >= 10
            else f"{found.adaptive.mean_s:.3g} s",
            "a rollout, adapting",
        ),
        (percent(found.gain(best)), f"less time than {best.name}, the best static layout"),
        (
            percent(max(found.gain(system) for system in found.static)),
            "less time than the worst static layout",
        ),
        (f"{len(used)} of {len(memory.layouts)}", "layouts fit"),
    ]
    cells = "".join(f"<li><b>{escape(a)}</b>{escape(b)}</li>" for a, b in tiles)
    return f'<ul class="tiles">{cells}</ul>'


def _sections(report: PlanReport) -> Iterator[str]:
    yield _section(
        "Time of a rollout",
        bars([_time_bar(system) for system in _systems(report)]),
        _table(
            ["system", "seconds", "prefill", "switches", "preempted", "saved by adapting"],
            [_time_row(report, system) for system in _systems(report)],
        ),
        source=f"Replayed {len(report.comparison.tokens)} rollouts with the planner that ships, on a "
        f"clock whose steps take what {report.steps.explained} say. Lengths: {report.lengths.source}.",
    )
    yield _section("The first rollout", _trace(report.comparison.traces[0]), *_switches(report))
    yield _section(
        "Memory of a device, GiB", _memory_bars(report), _memory_table(report), *_training(report)
    )
    yield _section(
        "Time of a decode step",
        *_step_plots(report),
        _details("Every predicted step", _step_table(report)),
        source=f"Predicted, from {report.steps.explained}.",
    )
    if report.programs:
        yield _section(
            "What a decode step sends",
            _table(["layout", "kind", "times", "devices", "bytes each"], _sent_rows(report)),
            _details(f"All {len(report.programs)} programs", _program_table(report)),
            source=f"Compiler: {SOURCES['compiler']}. {_depth(report)}",
        )
    yield _section("Response lengths", _lengths(report), source=f"{report.lengths.source}.")


def _systems(report: PlanReport) -> Sequence[System]:
    return report.comparison.adaptive, *report.comparison.static


def _time_bar(system: System) -> Bar:
    count = len(system.total_s)
    parts = (
        ("prefill", sum(system.prefill_s), colour(4)),
        ("decoding", sum(system.decode_s), colour(0)),
        ("switches", sum(system.switch_s), colour(1)),
    )
    segments = [Segment(name, seconds / count, c) for name, seconds, c in parts]
    return Bar(system.name, segments, f"{shown(system.mean_s)} s")


def _time_row(report: PlanReport, system: System) -> list[Cell]:
    found, count = report.comparison, len(system.total_s)
    return [
        system.name,
        system.mean_s,
        sum(system.prefill_s) / count,
        sum(system.switch_s) / count,
        sum(system.num_preempted),
        "" if system is found.adaptive else percent(found.gain(system)),
    ]


def _trace(trace: RolloutTrace) -> str:
    """Live sequences over time, and the layout in force."""
    names = list(dict.fromkeys(trace.layout))
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
    return drawn + legend([(name, colour(i)) for i, name in enumerate(names)])


def _switches(report: PlanReport) -> Iterator[str]:
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
        yield _table(header, rows)


def _memory_bars(report: PlanReport) -> str:
    rows = []
    for layout in report.memory.layouts:
        parts = (
            ("weights", layout.weights),
            ("optimizer and master weights", layout.optimizer),
            ("KV cache", layout.kv_cache),
            ("programs", layout.programs),
        )
        segments = [Segment(name, n / GIB, colour(i)) for i, (name, n) in enumerate(parts)]
        words = f"{layout.total / GIB:.3g}" + ("" if layout.is_used else ", not used")
        rows.append(Bar(str(layout.split), segments, words))
    limit = report.memory.limit / GIB
    return bars(rows, limit=limit, limit_words=f"a device has {limit:.3g}")


def _memory_table(report: PlanReport) -> str:
    header = ["layout", "weights", "optimizer", "KV cache", "programs", "all", "whole", ""]
    rows: list[list[Cell]] = [
        [
            str(layout.split),
            *(n / GIB for n in (layout.weights, layout.optimizer, layout.kv_cache)),
            layout.programs / GIB if report.programs else None,
            layout.total / GIB,
            layout.whole,
            layout.refusal or "fits",
        ]
        for layout in report.memory.layouts
    ]
    told = "".join(f"<li>{escape(reason)}</li>" for reason in report.memory.undivided)
    programs = f" Programs: {SOURCES['compiler']}." if report.programs else ""
    return (
        _table(header, rows)
        + (f"<ul>{told}</ul>" if told else "")
        + f'<p class="source">Whole: sequences that find pages at full length. {SOURCES["arithmetic"]}.'
        f"{programs}</p>"
    )


def _training(report: PlanReport) -> Iterator[str]:
    if report.memory.training:
        fits = "fits" if report.memory.training <= report.memory.limit else "does not fit"
        yield (
            f"<p>The training step takes {report.memory.training / GIB:.3g} GiB of a device at most: it "
            f"{fits}.</p>"
        )


def _step_plots(report: PlanReport) -> Iterator[str]:
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


def _step_table(report: PlanReport) -> str:
    steps = report.steps
    rows: list[list[Cell]] = [
        [context, live, *(None if s is None else 1e3 * s for s in line)]
        for context, table in zip(steps.contexts, steps.seconds, strict=True)
        for live, line in zip(steps.live, table, strict=True)
    ]
    return _table(["context", "live", *(f"{split} ms" for split in steps.splits)], rows)


def _sent_rows(report: PlanReport) -> list[list[Cell]]:
    return [
        [str(program.split), *cells]
        for program in report.programs
        if program.name == "decode" and not program.error
        for cells in decode_collectives(program)
    ]


def _program_table(report: PlanReport) -> str:
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
    return _table(header, rows)


def _depth(report: PlanReport) -> str:
    shallow = next((program for program in report.programs if program.is_extrapolated), None)
    if shallow is None:
        return "The whole model was compiled."
    depths = " and ".join(map(str, shallow.compiled_layers))
    return (
        f"Compiled with {depths} layers and taken to {shallow.layers}: every number is affine in the "
        "layers."
    )


def _lengths(report: PlanReport) -> str:
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


def _limits(report: PlanReport) -> str:
    parts = shares(report.comparison.adaptive.parts)
    names = {"sums": "sums over devices", "fixed": "fixed", "rows": "rows", "context": "KV cache"}
    segments = [
        Segment(names.get(name, name), 100 * share, colour(i))
        for i, (name, share) in enumerate(parts.items())
        if share > 0
    ]
    told = "".join(f"<li>{escape(line)}</li>" for line in report.limits)
    assert parts.keys() == WORDS.keys()
    return _section("What limits it", bars([Bar("decoding", segments, "")]), f"<ul>{told}</ul>")


def _sources(report: PlanReport) -> str:
    chip = "; ".join(f"{name} {value}" for name, value in report.subject.chip.items())
    told = [
        *report.notes,
        f"Steps: {report.steps.source}, that is {report.steps.explained}.",
        f"The chip, as its maker describes it: {chip}.",
        *(f"{name} {version}" for name, version in report.versions.items()),
    ]
    listed = "".join(f"<li>{escape(line)}</li>" for line in told)
    return _section("What this rests on", f"<ul>{listed}</ul><pre>{escape(report.command)}</pre>")


def _details(title: str, content: str) -> str:
    return f"<details><summary>{escape(title)}</summary>{content}</details>"


def _table(header: Sequence[str], rows: Sequence[Sequence[Cell]]) -> str:
    def cell(value: Cell) -> str:
        kind = "" if isinstance(value, str) else ' class="n"'
        return f"<td{kind}>{escape(shown(value))}</td>"

    head = "".join(f"<th>{escape(name)}</th>" for name in header)
    body = "".join(f"<tr>{''.join(map(cell, row))}</tr>" for row in rows)
    return f'<div class="wide"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'
