"""Makes a plan's report: which layouts fit, what steps take, what adapting gains."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise, product

import numpy as np

from pat_jax.common.errors import UserError
from pat_jax.common.text_table import percent
from pat_jax.planning.types import Split
from pat_jax.profiling.capacity.layout_parts import (
    memory_of,
    running_counts,
    steps_of,
)
from pat_jax.profiling.capacity.question import Question, machine_of, refused_layouts
from pat_jax.profiling.capacity.report import (
    LengthSummary,
    PlanReport,
    PlanSubject,
    Resting,
    Update,
)
from pat_jax.profiling.capacity.resting import both
from pat_jax.profiling.capacity.update import PlannedUpdate
from pat_jax.profiling.cross_compile.by_arithmetic import by_arithmetic
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
    series = question.series
    workloads = [series.workload(question.lengths, number) for number in range(series.rollouts)]
    begun = comparison.traces[0].layout[0]
    first = next(split for split in build.layouts if str(split) == begun)
    update = updating.of(workloads, first) if updating else None
    return PlanReport(
        question.command,
        _subject(question),
        memory_of(build, refused, programs),
        programs,
        compilation.versions if compilation else {},
        steps_of(machine, question.costs, series.draw.sequences),
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


SMALL = 0.01  # share of an update's time; a smaller saving is not mentioned


def inside_hosts(
    updating: PlannedUpdate, workloads: Sequence[Workload], target: Split
) -> Iterator[str]:
    """Yields a sentence if the update is faster with all parameters in each host, and they fit
    there. Both updates are computed by arithmetic: only programs of the planned one are
    compiled."""
    order = updating.built.order
    size = order.target.devices_per_host
    if order.target.num_hosts == 1 or order.run.fsdp_size:
        return
    here = replace(updating, programs=())
    divided = replace(order, run=replace(order.run, fsdp_size=size))
    there = replace(here, built=by_arithmetic(divided))
    room, less_room = (int(each.built.whole_sequences) for each in (here, there))
    if not less_room:
        return
    now, then = (each.of(workloads, target) for each in (here, there))
    saved = 1 - then.total_s / now.total_s
    if saved < SMALL or then.memory.shortage:
        return
    yield (
        f"The update gathers weights across hosts. With --fsdp_size {size} each host has all of them, "
        f"and an update takes {percent(saved)} less: {then.total_s:.3g} s instead of {now.total_s:.3g} (by "
        f"arithmetic). The KV cache then has room for {less_room:,} of the longest sequences, instead of "
        f"{room:,}."
    )


FASTER = 0.05  # share of a step; another layout that saves less is not mentioned


def of_tail(comparison: Comparison, machine: Machine) -> str:
    """Returns a sentence on the longest response, which no layout makes shorter."""
    steps = max(comparison.longest)
    edges = [0, *(n for n in machine.buckets.lengths if n < steps), steps]
    seconds = dict.fromkeys(map(str, machine.splits), 0.0)
    for split, (begin, end) in product(machine.splits, pairwise(edges)):
        length = machine.buckets.length_for(end)
        held = (begin + end) / 2
        step_s = machine.truth.decode_step(split, 1, length, held, 1)
        seconds[str(split)] += (end - begin) * step_s
    layout, alone = min(seconds.items(), key=lambda item: item[1])
    share = alone / comparison.adaptive.mean_s
    plainly = "" if comparison.drafting is None else " without drafts"
    return (
        f"The longest response, {steps:,} steps, would take {alone:.3g} s alone on the machine, in "
        f"{layout}: {percent(share)} of a rollout{plainly}. No layout is faster than that{plainly}; shorter "
        "responses are."
    )


def of_experts(
    step_s: Callable[[Split, int], float], splits: Sequence[Split], running: Sequence[int]
) -> str:
    """Returns a sentence for a model with experts: for how many running sequences another layout
    than the first is faster. `step_s` returns seconds of a decode step, by layout and sequences on
    the whole machine. `splits` ascend in their TP, and `running` ascends."""
    first = splits[0]
    best = {n: min(splits, key=lambda split: step_s(split, n)) for n in running}
    gains = [n for n in running if step_s(best[n], n) < (1 - FASTER) * step_s(first, n)]
    told = "Experts are on the same devices in every layout, and no switch moves one: "
    if not gains:
        return f"{told}in no layout is a step more than {percent(FASTER)} faster than in {first}."
    few = gains[0]
    most = gains[-1]
    slow = 1e3 * step_s(first, few)
    fast = 1e3 * step_s(best[few], few)
    told += (
        f"with {few:,} running a step takes {fast:.3g} ms in {best[few]} and {slow:.3g} in {first}"
    )
    more = [n for n in running if n > most]
    if not more:
        return f"{told}, and with {most:,} {best[most]} is the faster one still."
    return f"{told}; from {more[0]:,} running on no layout is more than {percent(FASTER)} faster than {first}."
