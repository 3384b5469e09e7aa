"""A plan as tables of text."""

from collections.abc import Iterator
from math import log10

from pat_jax.common.text_table import Cell, percent, text_table
from pat_jax.planning.memory import GIB
from pat_jax.profiling.capacity.report import KINDS, SOURCES, Memory, PlanReport, StepTimes
from pat_jax.profiling.cross_compile.compiled import CompiledProgram

UNCOMPILED = "–"
IN_A_STEP = 2  # loops around what happens in every decode step


def plan_text(report: PlanReport) -> str:
    """What fits, what is sent, how long steps take, what adapting gains, what limits it."""
    parts = [_title(report), *(f"Warning: {line}" for line in report.warnings)]
    parts.append(_memory(report.memory))
    parts += [_compiles(report), _sent(report)] if report.programs else []
    parts += [_steps(report.steps), _gains(report), *_switches(report)]
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
    header = ["layout", "weights", "optimizer", "KV cache", "programs", "all", "whole", ""]
    rows: list[list[Cell]] = [
        [
            str(layout.split),
            layout.weights / GIB,
            layout.optimizer / GIB,
            layout.kv_cache / GIB,
            layout.programs / GIB if memory.source == "compiler" else None,
            layout.total / GIB,
            layout.whole,
            layout.refusal or "fits",
        ]
        for layout in memory.layouts
    ]
    lines = [
        f"Memory of a device, GiB, of {memory.limit / GIB:.3g}; whole: sequences that find pages at "
        "full length",
        text_table(header, rows),
        f"programs: {SOURCES['compiler']}; the rest: {SOURCES['arithmetic']}"
        if memory.source == "compiler"
        else f"all: {SOURCES['arithmetic']}",
    ]
    if memory.training:
        fits = "fits" if memory.training <= memory.limit else "does NOT fit"
        lines.append(f"the training step takes {memory.training / GIB:.3g} GiB at most: {fits}")
    return "\n".join([*lines, *memory.undivided])


def _compiles(report: PlanReport) -> str:
    table = text_table(["layout", *KINDS], compile_rows(report))
    return "\n".join(["What compiles for it", table, *uncompiled_words(report)])


def compile_rows(report: PlanReport) -> list[list[Cell]]:
    """One for each layout, of yes and no, and a dash where nothing was compiled for it."""
    words = {True: "yes", False: "no", None: UNCOMPILED}
    return [
        [str(layout.split), *(words[can] for can in report.compiles(layout.split).values())]
        for layout in report.memory.layouts
    ]


def uncompiled_words(report: PlanReport) -> Iterator[str]:
    """What the dashes of `compile_rows` mean, where there are any."""
    if any(UNCOMPILED in row for row in compile_rows(report)):
        yield (
            f"{UNCOMPILED}: not compiled for it. Switches are between neighbours; weights from training "
            "go to the layouts with the least and the most TP, which stand for the others."
        )


def _sent(report: PlanReport) -> str:
    rows: list[list[Cell]] = []
    for program in report.programs:
        if program.name == "decode" and not program.error:
            rows += [[str(program.split), *cells] for cells in decode_collectives(program)]
    table = text_table(["layout", "kind", "times", "devices", "bytes each"], rows)
    lines = ["A decode step sends (the largest row bucket; counted by the compiler)", table]
    compiled = sum(program.compile_s for program in report.programs)
    lines.append(
        f"{len(report.programs)} programs compiled in {compiled:.0f} s of compiler time, "
        f"{len(report.failed)} refused"
    )
    shallow = next((p for p in report.programs if p.is_extrapolated), None)
    if shallow:
        depths = " and ".join(map(str, shallow.compiled_layers))
        lines.append(
            f"compiled with {depths} layers and taken to {shallow.layers}: every number is affine in "
            "the layers (--layers all compiles the whole model)"
        )
    lines += [f"refused: {program}: {program.error}" for program in report.failed]
    return "\n".join(lines)


def decode_collectives(program: CompiledProgram) -> Iterator[list[Cell]]:
    found = [sent for sent in program.collectives if sent.depth >= IN_A_STEP and sent.group > 1]
    for sent in found:
        yield [sent.kind, sent.count, sent.group, sent.num_bytes]
    if not found:
        yield ["nothing", None, None, None]


def _steps(steps: StepTimes) -> str:
    parts = [f"Decode step, ms, {steps.margin} (from {steps.explained})"]
    for context, table in zip(steps.contexts, steps.seconds, strict=True):
        header = [f"live, {context:,} tokens", *map(str, steps.splits)]
        rows = [
            [str(live), *(_marked(s, line) for s in line)]
            for live, line in zip(steps.live, table, strict=True)
        ]
        parts.append(text_table(header, rows))
    return "\n\n".join(parts) + "\n* the quickest layout of the line"


def _marked(seconds: float | None, line: tuple[float | None, ...]) -> str:
    if seconds is None:
        return ""
    ms = 1e3 * seconds
    digits = max(0, 2 - int(log10(ms))) if ms >= 1 else 2
    return f"{ms:.{digits}f}" + "*" * (seconds == min(s for s in line if s is not None))


def _gains(report: PlanReport) -> str:
    found = report.comparison
    rows: list[list[Cell]] = [
        [
            system.name,
            system.mean_s,
            sum(system.prefill_s) / len(system.total_s),
            sum(system.switch_s) / len(system.total_s),
            sum(system.num_preempted),
            "" if system is found.adaptive else percent(found.gain(system)),
        ]
        for system in (found.adaptive, *found.static)
    ]
    header = ["system", "seconds", "prefill", "switches", "preempted", "saved by adapting"]
    count = len(found.tokens)
    return "\n".join(
        [
            f"A rollout, mean of {count} replayed with the planner that ships (computed: nothing ran; "
            f"steps {report.steps.margin})",
            text_table(header, rows),
            f"over the best static layout, {found.best_static.name}: "
            f"{percent(found.gain(found.best_static))} (worst rollout {percent(found.worst_gain)}); "
            f"{percent(found.share_after_switch)} of the time comes after the first switch",
        ]
    )


def _switches(report: PlanReport) -> Iterator[str]:
    trace = report.comparison.traces[0]
    if not trace.switches:
        return
    rows: list[list[Cell]] = [
        [
            switch.at_s,
            f"{switch.source} to {switch.target}",
            switch.live,
            switch.step,
            switch.seconds,
            switch.predicted_saving_s,
            switch.kv,
        ]
        for switch in trace.switches
    ]
    header = ["at s", "switch", "live", "step", "takes s", "expected to save s", "KV cache"]
    yield "The switches of the first rollout\n" + text_table(header, rows)
