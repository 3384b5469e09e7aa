"""The tables of a plan's report, for its HTML page and its text alike."""

from collections.abc import Iterator
from dataclasses import fields
from statistics import fmean

from pat_jax.common.text_table import Table, percent, starred
from pat_jax.planning.memory import GIB
from pat_jax.profiling.capacity.report import (
    STAGES,
    PlanReport,
    Resting,
    StepTimes,
    Update,
    UpdateMemory,
)
from pat_jax.profiling.predict.update_times import Seconds
from pat_jax.profiling.simulate.comparison import ADAPTIVE, DRAFTING


def memory(report: PlanReport) -> Table:
    layouts = report.memory.layouts
    is_compiled = report.memory.source == "compiler"
    has_drafts = any(one.drafts for one in layouts)
    header = ["layout", "weights", "optimizer", "KV cache", *["drafts"] * has_drafts]
    rows = []
    for one in layouts:
        parts = [n / GIB for n in (one.weights, one.optimizer, one.kv_cache)]
        parts += [one.drafts / GIB] * has_drafts
        programs = one.programs / GIB if is_compiled else None
        use = "fits" if one.is_used else "not used"
        rows.append([str(one.split), *parts, programs, one.total / GIB, one.whole, use])
    return Table([*header, "programs", "all", "whole", ""], rows)


def steps(times: StepTimes) -> Iterator[Table]:
    """Yields a table of decode steps in ms for each context length. A star marks the fastest layout
    of each line."""
    for context, table in zip(times.contexts, times.seconds, strict=True):
        rows = [
            [str(running), *starred([s and 1e3 * s for s in line])]
            for running, line in zip(times.running, table, strict=True)
        ]
        yield Table([f"running, {context:,} tokens", *map(str, times.splits)], rows)


def gains(report: PlanReport) -> Table:
    """Returns a table of all systems. Its moves are switches and moves between replicas."""
    found = report.comparison
    saved = {ADAPTIVE: "", DRAFTING: ""} | {x.name: percent(found.gain(x)) for x in found.static}
    header = ["system", "seconds", "prefill", "moves", "preempted", "saved by adapting"]
    means = {x.name: [x.mean_s, fmean(x.prefill_s), fmean(x.switch_s)] for x in found.systems}
    rows = [[x.name, *means[x.name], sum(x.num_preempted), saved[x.name]] for x in found.systems]
    return Table(header, rows)


def switches(report: PlanReport) -> Table:
    """Returns a table of the switches of the first rollout."""
    header = ["at s", "switch", "running", "step", "takes s", "expected to save s", "KV cache"]
    rows = []
    for x in report.comparison.traces[0].switches:
        gain = x.seconds, x.predicted_saving_s
        rows.append([x.at_s, f"{x.source} to {x.target}", x.running, x.step, *gain, x.kv])
    return Table(header, rows)


def stage_seconds(update: Update) -> dict[str, Seconds]:
    """Returns the seconds of each stage of an update that takes time, by name, in order."""
    found = {words: getattr(update, name) for name, words in STAGES.items()}
    found |= dict(update.others)
    return {words: seconds for words, seconds in found.items() if seconds.total}


def stages(update: Update) -> Table:
    every = stage_seconds(update)
    every["all"] = total = sum(every.values(), Seconds())
    # Moments are sent only if they are offloaded.
    names = [field.name for field in fields(Seconds) if field.name != "host" or total.host]
    rows = [[words, s.total, *(getattr(s, name) for name in names)] for words, s in every.items()]
    return Table(["", "seconds", *names], rows)


def update_memory(memory: UpdateMemory) -> Table:
    """Returns a table of the parts of a device's memory during the update, in GiB."""
    names = ["parameters", "optimizer", "gradients", "reference", "base", "drafts", "others"]
    found = {name: getattr(memory, name) for name in names}
    found["temporaries, at least" if memory.is_least else "temporaries"] = memory.temporaries
    parts = {name: size / GIB for name, size in found.items() if size}
    return Table([*parts, "all"], [[*parts.values(), memory.total / GIB]])


def roles(resting: Resting) -> Table:
    """Returns a table of the models of a run, in GiB of a device."""
    header = ["role", "parameters", "optimizer", "moved in an iteration"]
    sizes = [[x.name, x.parameters, x.optimizer, x.moved] for x in resting.roles]
    return Table(header, [[name, *(n / GIB for n in row)] for name, *row in sizes])


def resting(found: Resting) -> Table:
    """Returns a table of iterations with models that wait on devices, and in the host's memory."""
    where = {"device": "on the devices", "host": "in the host's memory"}
    header = ["models wait", "take GiB", "KV cache GiB", "rollout s", "update s", "all s"]
    rows = [
        [
            where[x.rest],
            x.resident / GIB,
            x.kv_cache / GIB,
            x.rollout_s,
            x.update_s,
            x.total_s,
        ]
        for x in found.iterations
    ]
    return Table(header, rows)


def iterations(report: PlanReport) -> Table:
    adaptive, *_ = every = report.iterations
    saved = {x.name: percent(1 - adaptive.total_s / x.total_s) for x in every}
    saved |= {ADAPTIVE: "", DRAFTING: ""}
    header = ["system", "rollout s", "update s", "all", "rollout's share", "saved by adapting"]
    rows = [
        [x.name, x.rollout_s, x.update_s, x.total_s, percent(x.rollout_share), saved[x.name]]
        for x in every
    ]
    return Table(header, rows)
