"""A plan as tables of text."""

from collections.abc import Iterator
from math import log10

from pat_jax.common.text_table import percent, text_table
from pat_jax.planning.memory import GIB
from pat_jax.profiling.capacity.report import SOURCES, Memory, PlanReport, StepTimes
from pat_jax.profiling.capacity.tables import (
    between_hosts_table,
    compile_table,
    depth_words,
    draft_words,
    gain_table,
    memory_table,
    memory_words,
    sent_table,
    source_table,
    switch_table,
    uncompiled_words,
)
from pat_jax.profiling.capacity.update_report import Update
from pat_jax.profiling.capacity.update_tables import (
    UNVERIFIED,
    iteration_table,
    iteration_words,
    stage_table,
    update_memory_table,
    update_memory_words,
    update_source,
    update_words,
)


def plan_text(report: PlanReport) -> str:
    """What fits, what is sent, how long steps take, what adapting gains, what the update adds, what
    limits it."""
    parts = [_title(report), *(f"Warning: {line}" for line in report.warnings)]
    parts.append(_memory(report.memory))
    parts += [_compiles(report), _sent(report)] if report.programs else []
    parts += [_steps(report.steps), _gains(report), *_sources(report), *_switches(report)]
    parts += [_update(report.update), _iterations(report)] if report.update else []
    parts.append("What limits it:\n" + "\n".join(f"- {line}" for line in report.limits))
    if report.notes:
        parts.append("Taken for granted:\n" + "\n".join(f"- {line}" for line in report.notes))
    return "\n\n".join(parts)


def _title(report: PlanReport) -> str:
    subject = report.subject
    hosts = f" on {subject.num_hosts} hosts" if subject.num_hosts > 1 else ""
    return (
        f"{subject.model} in {subject.dtype} on {subject.target}: {subject.num_devices} x "
        f"{subject.chip['name']}{hosts}\n"
        f"{subject.sequences:,} responses of up to {subject.cap:,} tokens; "
        f"lengths: {report.lengths.source}"
    )


def _memory(memory: Memory) -> str:
    lines = [
        f"Memory of a device, GiB, of {memory.limit / GIB:.3g}; whole: sequences that find pages at "
        "full length",
        text_table(*memory_table(memory)),
        f"programs: {SOURCES['compiler']}; the rest: {SOURCES['arithmetic']}"
        if memory.source == "compiler"
        else f"all: {SOURCES['arithmetic']}",
    ]
    return "\n".join([*lines, *memory_words(memory)])


def _compiles(report: PlanReport) -> str:
    table = text_table(*compile_table(report))
    return "\n".join(["What compiles for it", table, *uncompiled_words(report)])


def _sent(report: PlanReport) -> str:
    table = text_table(*sent_table(report))
    lines = ["A decode step sends (the largest row bucket; counted by the compiler)", table]
    if (between := between_hosts_table(report)) is not None:
        lines += [
            "",
            "Between hosts, at the least (counted by the compiler; the other programs send nothing there)",
            text_table(*between),
        ]
    compiled = sum(program.compile_s for program in report.programs)
    lines.append(
        f"{len(report.programs)} programs compiled in {compiled:.0f} s of compiler time, "
        f"{len(report.failed)} refused"
    )
    lines.append(depth_words(report))
    lines += [f"refused: {program}: {program.error}" for program in report.failed]
    return "\n".join(lines)


def _steps(steps: StepTimes) -> str:
    parts = [f"Decode step, ms, {steps.margin} (from {steps.explained})"]
    for context, table in zip(steps.contexts, steps.seconds, strict=True):
        header = [f"live, {context:,} tokens", *map(str, steps.splits)]
        rows = [
            [str(live), *(_marked(s, line) for s in line)]
            for live, line in zip(steps.live, table, strict=True)
        ]
        parts.append(text_table(header, rows))
    return "\n\n".join(parts) + f"\n* the quickest layout of the line. {steps.reliance}"


def _marked(seconds: float | None, line: tuple[float | None, ...]) -> str:
    if seconds is None:
        return ""
    ms = 1e3 * seconds
    digits = max(0, 2 - int(log10(ms))) if ms >= 1 else 2
    return f"{ms:.{digits}f}" + "*" * (seconds == min(s for s in line if s is not None))


def _gains(report: PlanReport) -> str:
    found = report.comparison
    count = len(found.tokens)
    return "\n".join(
        [
            f"A rollout, mean of {count} replayed with the planner that ships (computed: nothing ran; "
            f"steps {report.steps.margin})",
            text_table(*gain_table(report)),
            f"over the best static layout, {found.best_static.name}: "
            f"{percent(found.gain(found.best_static))} (worst rollout {percent(found.worst_gain)}); "
            f"{percent(found.share_after_switch)} of the time comes after the first switch",
            *draft_words(report),
        ]
    )


def _sources(report: PlanReport) -> Iterator[str]:
    if (table := source_table(report)) is not None:
        yield "What drafts give, by where they are from\n" + text_table(*table)


def _switches(report: PlanReport) -> Iterator[str]:
    if report.comparison.traces[0].switches:
        yield "The switches of the first rollout\n" + text_table(*switch_table(report))


def _update(update: Update) -> str:
    return "\n".join(
        [
            f"The update, seconds, {UNVERIFIED} (mean of the same rollouts; computed: nothing ran)",
            text_table(*stage_table(update)),
            *update_words(update),
            update_source(update),
            "",
            "Memory of a device during the update, GiB",
            text_table(*update_memory_table(update.memory)),
            update_memory_words(update.memory),
        ]
    )


def _iterations(report: PlanReport) -> str:
    table = text_table(*iteration_table(report))
    return "\n".join(["A whole iteration", table, iteration_words(report)])
