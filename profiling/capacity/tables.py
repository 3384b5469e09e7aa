"""The tables and sentences of a plan that its text and its page have in common, by value."""

from collections.abc import Iterator
from statistics import fmean

from pat_jax.common.text_table import Cell, Table, percent
from pat_jax.planning.memory import GIB
from pat_jax.profiling.capacity.report import Memory, PlanReport
from pat_jax.profiling.cross_compile.compiled import CompiledProgram
from pat_jax.profiling.simulate.comparison import Comparison

UNCOMPILED = "–"
IN_A_STEP = 2  # loops around what happens in every decode step


def memory_table(memory: Memory) -> Table:
    parts = ["weights", "optimizer", "KV cache"]
    has_drafts = any(layout.drafts for layout in memory.layouts)
    header = ["layout", *parts, *["drafts"] * has_drafts, "programs", "all", "whole", ""]
    rows = [
        [
            str(layout.split),
            *(n / GIB for n in (layout.weights, layout.optimizer, layout.kv_cache)),
            *[layout.drafts / GIB] * has_drafts,
            layout.programs / GIB if memory.source == "compiler" else None,
            layout.total / GIB,
            layout.whole,
            "fits" if layout.is_used else "not used",
        ]
        for layout in memory.layouts
    ]
    return Table(header, rows)


def memory_words(memory: Memory) -> Iterator[str]:
    """What stands below the table: a long reason in a cell would make its line a tower."""
    yield from (f"{layout.split}: {layout.refusal}" for layout in memory.layouts if layout.refusal)
    yield from memory.undivided


def compile_table(report: PlanReport) -> Table:
    """Of each layout yes and no, and a dash where nothing was compiled for it."""
    words = {True: "yes", False: "no", None: UNCOMPILED}
    found = {layout.split: report.compiles(layout.split) for layout in report.memory.layouts}
    rows = [[str(split), *(words[can] for can in kinds.values())] for split, kinds in found.items()]
    return Table(["layout", *next(iter(found.values()))], rows)


def uncompiled_words(report: PlanReport) -> Iterator[str]:
    """What the dashes of `compile_table` mean, where there are any."""
    if any(UNCOMPILED in row for row in compile_table(report).rows):
        yield (
            f"{UNCOMPILED}: not compiled for it. Switches are between neighbours; bursts with drafts and "
            "weights from training are those of the layouts with the least and the most TP, which stand for the "
            "others."
        )


def sent_table(report: PlanReport) -> Table:
    rows = [
        [str(program.split) + ", drafts" * (program.budget > 0), *cells]
        for program in report.programs
        if program.name == "decode" and not program.error
        for cells in _collectives(program)
    ]
    return Table(["layout", "kind", "times", "devices", "bytes each"], rows)


def _collectives(program: CompiledProgram) -> Iterator[list[Cell]]:
    found = [sent for sent in program.collectives if sent.depth >= IN_A_STEP and sent.group > 1]
    for sent in found:
        yield [sent.kind, sent.count, sent.group, sent.num_bytes]
    if not found:
        yield ["nothing", None, None, None]


def between_hosts_table(report: PlanReport) -> Table | None:
    """What each program sends over the slow links; None where there are none."""
    subject = report.subject
    if subject.num_hosts == 1:
        return None
    per_host = subject.num_devices // subject.num_hosts
    rate = 1e9 * float(subject.chip["network GB/s of a device"])
    rows = []
    for program in report.programs:
        inside = IN_A_STEP if program.name == "decode" else 0
        crossing = [x for x in program.collectives if x.depth >= inside and x.hosts > 1]
        num_bytes = sum(sent.leaving(per_host) for sent in crossing)
        if num_bytes:
            run = "step" if inside else "run"
            rows.append([str(program), run, num_bytes / 2**20, 1e3 * num_bytes / per_host / rate])
    return Table(["program", "of a", "MiB leave a host", "ms at the links' rate"], rows)


def depth_words(report: PlanReport) -> str:
    shallow = next((program for program in report.programs if program.is_extrapolated), None)
    if shallow is None:
        return "The whole model was compiled."
    depths = " and ".join(map(str, shallow.compiled_layers))
    return (
        f"Compiled with {depths} layers and taken to {shallow.layers}: every number is affine in the "
        "layers (--layers all compiles the whole model)."
    )


def gain_table(report: PlanReport) -> Table:
    found = report.comparison
    header = ["system", "seconds", "prefill", "switches", "preempted", "saved by adapting"]
    rows = [
        [
            system.name,
            system.mean_s,
            sum(system.prefill_s) / len(system.total_s),
            sum(system.switch_s) / len(system.total_s),
            sum(system.num_preempted),
            percent(found.gain(system)) if system in found.static else "",
        ]
        for system in found.systems
    ]
    return Table(header, rows)


def draft_words(report: PlanReport) -> Iterator[str]:
    """What drafts add, where there are any."""
    found, drafting = report.comparison, report.comparison.drafting
    if drafting is not None:
        best = found.best_static
        said = fmean(drafting.tokens_per_step)
        yield (
            f"with drafts a sequence says {said:.3g} tokens in a decode step, and a rollout takes "
            f"{drafting.mean_s:.3g} s: {best.mean_s / drafting.mean_s:.3g} times as fast as {best.name} "
            f"without, the best static layout, and {found.adaptive.mean_s / drafting.mean_s:.3g} times as "
            "fast as adapting without"
        )


SOURCE_HEADER = ("drafts from", "tokens a step", "rollout s", "times as fast as without")


def source_rows(found: Comparison) -> Iterator[list[Cell]]:
    """Under `SOURCE_HEADER`, without drafts first; nothing where none are made."""
    adaptive = found.adaptive
    if found.by_source:
        yield ["nothing", 1, adaptive.mean_s, None]
    for one in found.by_source:
        tokens, faster = fmean(one.tokens_per_step), adaptive.mean_s / one.mean_s
        yield [one.name, tokens, one.mean_s, f"{faster:.2f} x"]


def source_table(report: PlanReport) -> Table | None:
    """None where no drafts are made."""
    rows = list(source_rows(report.comparison))
    return Table(SOURCE_HEADER, rows) if rows else None


def switch_table(report: PlanReport) -> Table:
    """Of the first rollout."""
    header = ["at s", "switch", "live", "step", "takes s", "expected to save s", "KV cache"]
    rows = [
        [
            switch.at_s,
            f"{switch.source} to {switch.target}",
            switch.live,
            switch.step,
            switch.seconds,
            switch.predicted_saving_s,
            switch.kv,
        ]
        for switch in report.comparison.traces[0].switches
    ]
    return Table(header, rows)
