"""A plan as one HTML file."""

from collections.abc import Iterator
from html import escape
from pathlib import Path

from pat_jax.common.files import replace_text
from pat_jax.common.html.bars import Bar, Segment, bars
from pat_jax.common.html.page import details, html_table, listed, section, tiles, web_page
from pat_jax.common.picture_style import colour
from pat_jax.common.text_table import percent, shown
from pat_jax.profiling.capacity.charts import (
    iteration_bar,
    length_plot,
    memory_bars,
    program_table,
    step_plots,
    step_table,
    time_bar,
    trace_plot,
    update_bar,
    update_memory_bar,
)
from pat_jax.profiling.capacity.limits import NAMES, shares
from pat_jax.profiling.capacity.report import SOURCES, PlanReport
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
    header = (
        f"<header><p>Plan before you rent</p><h1>{escape(title)}</h1>"
        f"<p>{_workload(report)}</p>{_warnings(report)}</header>"
    )
    return web_page(
        f"{title}: a plan by pat_jax",
        f"{header}{''.join(sections)}",
    )


def _workload(report: PlanReport) -> str:
    subject = report.subject
    return escape(
        f"{subject.num_devices} × {subject.chip['name']}, {subject.dtype}; a rollout of "
        f"{subject.sequences:,} responses of up to {subject.cap:,} tokens. Computed before any of "
        "these devices was there: nothing ran."
    )


def _warnings(report: PlanReport) -> str:
    return "".join(f'<p class="warning">{escape(line)}</p>' for line in report.warnings)


def _answer(report: PlanReport) -> str:
    """The few numbers that were asked for."""
    found, memory = report.comparison, report.memory
    best = found.best_static
    used = [layout for layout in memory.layouts if layout.is_used]
    facts = [
        (f"{shown(found.adaptive.mean_s)} s", f"a rollout, adapting; steps {report.steps.margin}"),
        _saved(found.gain(best), f"{best.name}, the best static layout"),
        _saved(max(map(found.gain, found.static)), "the worst static layout"),
        (f"{len(used)} of {len(memory.layouts)}", "layouts fit"),
        *[
            (f"{shown(iteration.total_s)} s", f"an iteration, adapting; its update {UNVERIFIED}")
            for iteration in report.iterations[:1]
        ],
    ]
    return tiles(facts)


def _saved(gain: float, than: str) -> tuple[str, str]:
    return percent(abs(gain)), f"{'less' if gain >= 0 else 'more'} time than {than}"


def _sections(report: PlanReport) -> Iterator[str]:
    yield section(
        "Time of a rollout",
        bars([time_bar(system) for system in report.comparison.systems]),
        html_table(gain_table(report)),
        listed(draft_words(report)),
        source=f"Replayed {len(report.comparison.tokens)} rollouts with the planner that ships, on a "
        f"clock whose steps take what {report.steps.explained} say. {report.steps.reliance} Lengths: "
        f"{report.lengths.source}.",
    )
    if (table := source_table(report)) is not None:
        yield section(
            "What drafts give",
            html_table(table),
            source="By where they are from. None of these rollouts ran; what is taken for true of drafts "
            "stands at the end.",
        )
    switches = html_table(switch_table(report)) if report.comparison.traces[0].switches else ""
    yield section("The first rollout", trace_plot(report), switches)
    if report.update:
        yield from _update(report, report.update)
    programs = f" Programs: {SOURCES['compiler']}." if report.programs else ""
    yield section(
        "Memory of a device, GiB",
        memory_bars(report),
        html_table(memory_table(report.memory)),
        listed(memory_words(report.memory)),
        source="Whole: sequences that find pages at full length. "
        f"Figures: {SOURCES['arithmetic']}.{programs}",
    )
    yield section(
        "Time of a decode step",
        *step_plots(report),
        details("Every predicted step", html_table(step_table(report))),
        source=f"Predicted, from {report.steps.explained}. {report.steps.reliance}",
    )
    if report.programs:
        yield section(
            "What compiles for it",
            html_table(compile_table(report)),
            listed(f"refused: {program}: {program.error}" for program in report.failed),
            source=" ".join(uncompiled_words(report)),
        )
        yield section(
            "What a decode step sends",
            html_table(sent_table(report)),
            *_between_hosts(report),
            details(f"All {len(report.programs)} programs", html_table(program_table(report))),
            source=f"Compiler: {SOURCES['compiler']}. {depth_words(report)}",
        )
    yield section("Response lengths", length_plot(report), source=f"{report.lengths.source}.")


def _between_hosts(report: PlanReport) -> Iterator[str]:
    if (table := between_hosts_table(report)) is not None:
        yield details("What is sent between hosts, at the least", html_table(table))


def _update(report: PlanReport, update: Update) -> Iterator[str]:
    yield section(
        "Time of an iteration",
        bars([iteration_bar(each, update) for each in report.iterations]),
        html_table(iteration_table(report)),
        source=iteration_words(report),
    )
    yield section(
        "Time of the update",
        bars([update_bar(update)]),
        html_table(stage_table(update)),
        listed(update_words(update)),
        source=update_source(update),
    )
    yield section(
        "Memory of a device during the update, GiB",
        update_memory_bar(update.memory),
        html_table(update_memory_table(update.memory)),
        source=update_memory_words(update.memory),
    )


def _limits(report: PlanReport) -> str:
    parts = shares(report.comparison.adaptive.parts)
    segments = [
        Segment(NAMES[name], 100 * share, colour(i))
        for i, (name, share) in enumerate(parts.items())
        if share > 0
    ]
    return section("What limits it", bars([Bar("decoding", segments, "")]), listed(report.limits))


def _sources(report: PlanReport) -> str:
    chip = "; ".join(f"{name} {value}" for name, value in report.subject.chip.items())
    told = [
        *report.notes,
        f"Steps: {report.steps.source}, that is {report.steps.explained}.",
        f"The chip, as its maker describes it: {chip}.",
        *(f"{name} {version}" for name, version in report.versions.items()),
    ]
    return section("What this rests on", listed(told), f"<pre>{escape(report.command)}</pre>")
