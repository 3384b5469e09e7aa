"""Makes a plan's report: which layouts fit, what steps take, what adapting gains."""

from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from pat_jax.common.errors import UserError
from pat_jax.common.text_table import percent
from pat_jax.planning.types import Split
from pat_jax.profiling.capacity.inside_hosts import inside_hosts
from pat_jax.profiling.capacity.layout_parts import (
    memory_of,
    running_counts,
    steps_of,
)
from pat_jax.profiling.capacity.limits import of_experts, of_tail
from pat_jax.profiling.capacity.question import Question, machine_of, refused_layouts
from pat_jax.profiling.capacity.report import LengthSummary, PlanReport, PlanSubject
from pat_jax.profiling.capacity.resting import both
from pat_jax.profiling.capacity.resting_report import Resting
from pat_jax.profiling.capacity.update import PlannedUpdate
from pat_jax.profiling.capacity.update_report import Update
from pat_jax.profiling.cross_compile.compile import Compilation
from pat_jax.profiling.cross_compile.compiled import CompiledProgram
from pat_jax.profiling.cross_compile.target_build import TargetBuild
from pat_jax.profiling.simulate.comparison import Comparison, adaptive_s, compare
from pat_jax.profiling.simulate.machine import Machine, Workload

PROBABILITIES = (0.5, 0.9, 0.99)  # of the quantiles of response lengths


def planned(question: Question, compilation: Compilation | None) -> PlanReport:
    """Returns the report that answers a question. `compilation` has the target's compiled programs,
    or is None if nothing was compiled. Raises UserError if no layout can be used."""
    build = question.build
    refused = refused_layouts(question, compilation)
    machine = machine_of(question, _used_layouts(question, refused))
    comparison = compare(machine, question.lengths, question.series)
    programs = compilation.programs if compilation else ()
    updating = None
    if question.run.trains:
        updating = PlannedUpdate(build, programs, question.options.memory_options)
    workloads, first = _learned(question, comparison)
    update = updating.of(workloads, first) if updating else None
    return PlanReport(
        question.command,
        _subject(question),
        memory_of(build, refused, programs),
        programs,
        compilation.versions if compilation else {},
        steps_of(machine, question.costs, question.series.draw.sequences),
        _lengths(question),
        comparison,
        update,
        (
            of_tail(comparison, machine),
            *_of_experts(question, machine),
            *(inside_hosts(updating, workloads, first) if updating else ()),
        ),
        tuple(_notes(question, programs, updating)),
        tuple(_warnings(question, update)),
        _resting(question, comparison, updating, workloads),
    )


def _used_layouts(question: Question, refused: Mapping[Split, str]) -> tuple[Split, ...]:
    build = question.build
    used = tuple(split for split in build.layouts if split not in refused)
    if not used:
        reasons = "; ".join(f"{split}: {reason}" for split, reason in refused.items())
        raise UserError(
            f"target {build.order.target}: no layout of {question.name} can be used: {reasons}"
        )
    return used


def _resting(
    question: Question,
    comparison: Comparison,
    updating: PlannedUpdate | None,
    workloads: Sequence[Workload],
) -> Resting | None:
    """Returns iterations with models that wait on devices, and in the host's memory, or None if
    there are no models besides the policy and its reference."""
    if updating is None or not question.build.order.others:
        return None

    def rollout_s(build: TargetBuild, used: tuple[Split, ...]) -> float:
        if build is question.build:
            return comparison.adaptive.mean_s
        machine = machine_of(question, used, build.memory)
        return adaptive_s(machine, question.lengths, question.series)

    return both(question.build, updating, workloads, rollout_s, question.costs)


def _of_experts(question: Question, machine: Machine) -> Iterator[str]:
    if question.build.order.model.experts is not None:
        lengths = machine.buckets.lengths
        sequences = question.series.draw.sequences
        context = lengths[len(lengths) // 2]
        yield of_experts(
            lambda split, n: machine.truth.decode_step(
                split, -(-n // split.dp), context, running=n
            ),
            machine.splits,
            running_counts(sequences),
        )


def _learned(question: Question, comparison: Comparison) -> tuple[list[Workload], Split]:
    """Returns the replayed rollouts, and the layout in which the first adaptive one begins."""
    series = question.series
    first = comparison.traces[0].layout[0]
    workloads = [series.workload(question.lengths, number) for number in range(series.rollouts)]
    return workloads, next(split for split in question.build.layouts if str(split) == first)


def _subject(question: Question) -> PlanSubject:
    order = question.build.order
    draw = question.series.draw
    chip = order.target.chip
    return PlanSubject(
        question.name,
        str(order.target),
        order.target.num_devices,
        order.target.num_hosts,
        {
            "name": chip.name,
            "memory GiB": round(chip.memory_bytes / 2**30, 1),
            "memory TB/s": chip.memory_bytes_s / 1e12,
            "bfloat16 Tflop/s": chip.flops_s / 1e12,
            "link": chip.link,
            "link GB/s, one way": chip.link_bytes_s / 1e9,
            "network GB/s of a device": chip.host_link_bytes_s / 1e9,
        },
        order.run.dtype,
        draw.sequences,
        draw.cap,
        order.run.rollout.max_prompt_length,
        order.run.trains,
    )


def _lengths(question: Question) -> LengthSummary:
    lengths = question.lengths
    draw = question.series.draw
    tokens = np.clip(np.rint(draw.scale * lengths.quantile(np.array(PROBABILITIES))), 1, draw.cap)
    return LengthSummary(
        lengths.source,
        lengths.mean(draw.cap, draw.scale),
        tuple(zip(PROBABILITIES, tokens.astype(int).tolist(), strict=True)),
        lengths.share_beyond(draw.cap / draw.scale),
        draw.correlation,
        draw.samples_per_prompt,
    )


def _warnings(question: Question, update: Update | None) -> Iterator[str]:
    if update and (notice := update.memory.shortage or update.memory.tightness):
        yield notice
    lengths = question.lengths
    draw = question.series.draw
    cut_at = lengths.cut_at
    if cut_at is not None and draw.scale * cut_at < draw.cap:
        yield (
            f"{percent(lengths.share_of(cut_at))} of the responses of {lengths.source} stop at "
            f"{cut_at:,} tokens as if cut there, below the cap of {draw.cap:,}: their other tokens "
            f"are missing, and the real tail is longer; give lengths cut at {draw.cap:,} or later, or ask "
            f"for --max_completion_length {round(draw.scale * cut_at)}."
        )


def _notes(
    question: Question, programs: Sequence[CompiledProgram], updating: PlannedUpdate | None
) -> Iterator[str]:
    costs = question.costs
    draw = question.series.draw
    yield from costs.notes
    yield from question.source.words(costs.drafts.most) if question.source else ()
    yield from updating.notes if updating else ()
    if question.lengths.prompts is None:
        yield f"Prompts of {draw.prompt_tokens} tokens each."
    else:
        yield "Prompts as long as the file of lengths says."
    yield "The planner has seen one rollout of the same kind before the first."
    yield "Prompts that samples share are counted for each of them in the KV cache, once in the prefill."
    depths = [
        one.compiled_layers[0] for one in programs if one.num_draft_tokens and one.is_extrapolated
    ]
    if depths and costs.drafts.exit_layer >= depths[0]:
        yield (
            f"In compiled programs {depths[0] - 1} of the first {costs.drafts.exit_layer} layers make "
            "drafts: the times lack those of the other layers (--layers all has them)."
        )
