"""What a plan's text and its page say of the update and of whole iterations, by value."""

from collections.abc import Iterator
from dataclasses import fields

from pat_jax.common.text_table import Table, percent
from pat_jax.planning.memory import GIB
from pat_jax.profiling.capacity.report import SOURCES, PlanReport
from pat_jax.profiling.capacity.update_report import RELIANCE, STAGES, Update, UpdateMemory
from pat_jax.profiling.predict.update_times import Seconds
from pat_jax.profiling.simulate.comparison import ADAPTIVE, DRAFTING

UNVERIFIED = "not verified"
ADAPTING = ADAPTIVE, DRAFTING


def stages(update: Update) -> Iterator[tuple[str, Seconds]]:
    """Those that there are, in their order, by name."""
    for name, words in STAGES.items():
        seconds = getattr(update, name)
        if seconds.total:
            yield words, seconds


def stage_table(update: Update) -> Table:
    every = dict(stages(update))
    every["all"] = total = sum(every.values(), Seconds())
    # Moments travel only where they are offloaded.
    names = [field.name for field in fields(Seconds) if field.name != "host" or total.host]
    rows = [[words, s.total, *(getattr(s, name) for name in names)] for words, s in every.items()]
    return Table(["", "seconds", *names], rows)


def update_words(update: Update) -> Iterator[str]:
    batches = update.batches
    rows, length = batches.largest
    steps = f"{batches.steps} optimizer step" + "s" * (batches.steps > 1)
    yield (
        f"In {update.split}, parameters over {update.fsdp} devices: {batches.tokens:,.0f} tokens of prompts and "
        f"responses in {batches.micro_batches:,.0f} micro-batches of up to {rows} x {length:,} tokens, "
        f"{percent(batches.padding)} of them padding; {steps}."
    )
    if update.scored:
        yield f"Log-probabilities are those of {' and of '.join(update.scored)}."
    yield (
        f"Model FLOP utilisation {percent(update.mfu)}, {UNVERIFIED}: {update.flops / 1e15:,.3g} PFLOP in the "
        f"{update.update_s:.3g} s before weights go to {update.target}."
    )


def update_source(update: Update) -> str:
    return (
        f"Composed: operations, bytes and collectives are {SOURCES[update.source]}; attention is counted by "
        f"hand of the lengths. {RELIANCE}"
    )


def update_memory_table(memory: UpdateMemory) -> Table:
    parts = {name: size for name, size in memory_parts(memory) if size}
    header = [*parts, "all"]
    return Table(header, [[*(size / GIB for size in parts.values()), memory.total / GIB]])


def memory_parts(memory: UpdateMemory) -> Iterator[tuple[str, int]]:
    yield "parameters", memory.parameters
    yield "optimizer", memory.optimizer
    yield "gradients", memory.gradients
    yield "reference", memory.reference
    yield "base", memory.base
    yield "drafts", memory.drafts
    yield "temporaries, at least" if memory.is_least else "temporaries", memory.temporaries


def update_memory_words(memory: UpdateMemory) -> str:
    least = "at least " * memory.is_least
    fits = "does NOT fit" if memory.shortage else "may fit" if memory.is_least else "fits"
    return (
        f"The update's largest program, {memory.stage}, takes {least}{memory.total / GIB:.3g} GiB of a device's "
        f"{memory.limit / GIB:.3g}: it {fits}."
        + f" {memory.offloaded / GIB:.3g} GiB of moments rest in the host's memory, and are on the device in the "
        "optimizer's step alone." * (memory.offloaded > 0)
    )


def iteration_table(report: PlanReport) -> Table:
    header = ["system", "rollout s", "update s", "all", "rollout's share", "saved by adapting"]
    adaptive, *others = report.iterations
    rows = [
        [
            each.name,
            each.rollout_s,
            each.update_s,
            each.total_s,
            percent(each.rollout_share),
            "" if each.name in ADAPTING else percent(1 - adaptive.total_s / each.total_s),
        ]
        for each in (adaptive, *others)
    ]
    return Table(header, rows)


def iteration_words(report: PlanReport) -> str:
    adaptive, *others = report.iterations
    static = [each for each in others if each.name not in ADAPTING]
    best = min(static, key=lambda each: each.total_s)
    drafting = "".join(
        f"With drafts it takes {each.total_s:.3g} s, where adapting without takes {adaptive.total_s:.3g}. "
        for each in others
        if each.name == DRAFTING
    )
    return (
        f"Adapting, the update takes {percent(1 - adaptive.rollout_share)} of an iteration; an iteration takes "
        f"{percent(1 - adaptive.total_s / best.total_s)} less than in {best.name}, the best static layout. "
        f"{drafting}Rewards and the host's work are left out; steps {report.steps.margin}, the update {UNVERIFIED}."
    )
