"""The tables of a plan, by value: its page and its text print the same."""

from collections.abc import Iterator
from dataclasses import fields
from math import log10
from statistics import fmean

from pat_jax.common.text_table import Cell, Table, percent
from pat_jax.planning.memory import GIB
from pat_jax.profiling.capacity.report import PlanReport, StepTimes
from pat_jax.profiling.capacity.update_report import STAGES, Update, UpdateMemory
from pat_jax.profiling.cross_compile.compiled import CompiledProgram
from pat_jax.profiling.predict.update_times import Seconds
from pat_jax.profiling.simulate.comparison import ADAPTIVE, DRAFTING, Comparison

UNCOMPILED = "–"
IN_A_STEP = 2  # loops around what happens in every decode step
ADAPTING = ADAPTIVE, DRAFTING


def memory(report: PlanReport) -> Table:
    layouts, is_compiled = report.memory.layouts, report.memory.source == "compiler"
    has_drafts = any(layout.drafts for layout in layouts)
    header = ["layout", "weights", "optimizer", "KV cache", *["drafts"] * has_drafts]
    rows = [
        [
            str(layout.split),
            *(n / GIB for n in (layout.weights, layout.optimizer, layout.kv_cache)),
            *[layout.drafts / GIB] * has_drafts,
            layout.programs / GIB if is_compiled else None,
            layout.total / GIB,
            layout.whole,
            "fits" if layout.is_used else "not used",
        ]
        for layout in layouts
    ]
    return Table([*header, "programs", "all", "whole", ""], rows)


def compiles(report: PlanReport) -> Table:
    """Of each layout yes and no, and a dash where nothing was compiled for it."""
    words = {True: "yes", False: "no", None: UNCOMPILED}
    found = {layout.split: report.compiles(layout.split) for layout in report.memory.layouts}
    rows = [[str(split), *(words[can] for can in kinds.values())] for split, kinds in found.items()]
    return Table(["layout", *next(iter(found.values()))], rows)


def programs(report: PlanReport) -> Table:
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


def sent(report: PlanReport) -> Table:
    rows = [
        [str(program.split) + ", drafts" * (program.budget > 0), *cells]
        for program in report.programs
        if program.name == "decode" and not program.error
        for cells in _collectives(program)
    ]
    return Table(["layout", "kind", "times", "devices", "bytes each"], rows)


def _collectives(program: CompiledProgram) -> list[list[Cell]]:
    found = [each for each in program.collectives if each.depth >= IN_A_STEP and each.group > 1]
    cells: list[list[Cell]] = [[each.kind, each.count, each.group, each.num_bytes] for each in found]
    return cells or [["nothing", None, None, None]]


def between_hosts(report: PlanReport) -> Table:
    """What each program sends over the slow links."""
    subject = report.subject
    per_host = subject.num_devices // subject.num_hosts
    rate = 1e9 * float(subject.chip["network GB/s of a device"])
    rows = []
    for program in report.programs:
        inside = IN_A_STEP if program.name == "decode" else 0
        crossing = [x for x in program.collectives if x.depth >= inside and x.hosts > 1]
        num_bytes = sum(each.leaving(per_host) for each in crossing)
        if num_bytes:
            run = "step" if inside else "run"
            rows.append([str(program), run, num_bytes / 2**20, 1e3 * num_bytes / per_host / rate])
    return Table(["program", "of a", "MiB leave a host", "ms at the links' rate"], rows)


def steps(report: PlanReport) -> Table:
    times = report.steps
    rows = [
        [context, live, *(None if s is None else 1e3 * s for s in line)]
        for context, table in zip(times.contexts, times.seconds, strict=True)
        for live, line in zip(times.live, table, strict=True)
    ]
    return Table(["context", "live", *(f"{split} ms" for split in times.splits)], rows)


def marked_steps(times: StepTimes) -> Iterator[Table]:
    """One for each context, with a star at the fastest layout of each line."""
    for context, table in zip(times.contexts, times.seconds, strict=True):
        rows = [
            [str(live), *(_marked(s, line) for s in line)]
            for live, line in zip(times.live, table, strict=True)
        ]
        yield Table([f"live, {context:,} tokens", *map(str, times.splits)], rows)


def _marked(seconds: float | None, line: tuple[float | None, ...]) -> str:
    if seconds is None:
        return ""
    ms = 1e3 * seconds
    digits = max(0, 2 - int(log10(ms))) if ms >= 1 else 2
    return f"{ms:.{digits}f}" + "*" * (seconds == min(s for s in line if s is not None))


def gains(report: PlanReport) -> Table:
    found = report.comparison
    header = ["system", "seconds", "prefill", "switches", "preempted", "saved by adapting"]
    rows = [
        [
            system.name,
            system.mean_s,
            fmean(system.prefill_s),
            fmean(system.switch_s),
            sum(system.num_preempted),
            percent(found.gain(system)) if system in found.static else "",
        ]
        for system in found.systems
    ]
    return Table(header, rows)


SOURCE_HEADER = ("drafts from", "tokens a step", "rollout s", "times as fast as without")


def source_rows(found: Comparison) -> Iterator[list[Cell]]:
    """Under `SOURCE_HEADER`, without drafts first; nothing where none are made."""
    adaptive = found.adaptive
    if found.by_source:
        yield ["nothing", 1, adaptive.mean_s, None]
    for one in found.by_source:
        tokens, faster = fmean(one.tokens_per_step), adaptive.mean_s / one.mean_s
        yield [one.name, tokens, one.mean_s, f"{faster:.2f} x"]


def sources(report: PlanReport) -> Table:
    return Table(SOURCE_HEADER, list(source_rows(report.comparison)))


def switches(report: PlanReport) -> Table:
    """Of the first rollout."""
    header = ["at s", "switch", "live", "step", "takes s", "expected to save s", "KV cache"]
    rows = [
        [x.at_s, f"{x.source} to {x.target}", x.live, x.step, x.seconds, x.predicted_saving_s, x.kv]
        for x in report.comparison.traces[0].switches
    ]
    return Table(header, rows)


def stage_seconds(update: Update) -> dict[str, Seconds]:
    """Of the stages that there are, in their order, by name."""
    found = {words: getattr(update, name) for name, words in STAGES.items()}
    return {words: seconds for words, seconds in found.items() if seconds.total}


def stages(update: Update) -> Table:
    every = stage_seconds(update)
    every["all"] = total = sum(every.values(), Seconds())
    # Moments travel only where they are offloaded.
    names = [field.name for field in fields(Seconds) if field.name != "host" or total.host]
    rows = [[words, s.total, *(getattr(s, name) for name in names)] for words, s in every.items()]
    return Table(["", "seconds", *names], rows)


def update_parts(memory: UpdateMemory) -> dict[str, float]:
    """GiB of what a device holds during the update, by name."""
    names = ["parameters", "optimizer", "gradients", "reference", "base", "drafts"]
    found = {name: getattr(memory, name) for name in names}
    found["temporaries, at least" if memory.is_least else "temporaries"] = memory.temporaries
    return {name: size / GIB for name, size in found.items() if size}


def update_memory(memory: UpdateMemory) -> Table:
    parts = update_parts(memory)
    return Table([*parts, "all"], [[*parts.values(), memory.total / GIB]])


def iterations(report: PlanReport) -> Table:
    header = ["system", "rollout s", "update s", "all", "rollout's share", "saved by adapting"]
    adaptive, *_ = report.iterations
    rows = [
        [
            each.name,
            each.rollout_s,
            each.update_s,
            each.total_s,
            percent(each.rollout_share),
            "" if each.name in ADAPTING else percent(1 - adaptive.total_s / each.total_s),
        ]
        for each in report.iterations
    ]
    return Table(header, rows)
