"""Sentences about what keeps a rollout from being faster: from a comparison, never from a rule of
thumb."""

from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise, product

from pat_jax.common.text_table import percent
from pat_jax.planning.memory import GIB
from pat_jax.planning.types import Split
from pat_jax.profiling.simulate.comparison import Comparison, StepParts
from pat_jax.profiling.simulate.machine import Machine

PARTS = {  # fields of `StepParts`: a name, and words for a sentence
    "sums": (
        "sums over devices",
        "sums over the devices of a replica: faster links, or a lower TP",
    ),
    "fixed": ("fixed", "what every step costs whatever is running: weights read once, launches"),
    "rows": ("rows", "work for each row: matrix products and sampling"),
    "context": ("KV cache", "reading the KV cache"),
    "host": ("host", "the host's time for each running sequence"),
}
FASTER = 0.05  # share of a step; another layout that saves less is not mentioned
SMALL = 0.005  # share of a rollout; less is not mentioned


def limits(comparison: Comparison, machine: Machine) -> tuple[str, ...]:
    """Sentences on what limits the rollout, the most important first."""
    return (
        _decoding(comparison),
        _tail(comparison, machine),
        _switches(comparison),
        *_pages(comparison, machine),
        *_prefill(comparison),
    )


def _decoding(comparison: Comparison) -> str:
    parts = shares(comparison.adaptive.parts)
    largest = max(parts, key=lambda name: parts[name])
    told = ", ".join(f"{name} {percent(share)}" for name, share in parts.items() if share >= SMALL)
    return f"Decoding goes most of all to {dict(PARTS.values())[largest]} ({told})."


def shares(parts: StepParts) -> dict[str, float]:
    """Shares of the decoding time, by the name of the part."""
    return {name: getattr(parts, field) / parts.total_s for field, (name, _) in PARTS.items()}


def _tail(comparison: Comparison, machine: Machine) -> str:
    steps = max(comparison.longest)
    edges = [0, *(n for n in machine.buckets.lengths if n < steps), steps]
    seconds = dict.fromkeys(map(str, machine.splits), 0.0)
    for split, (begin, end) in product(machine.splits, pairwise(edges)):
        length, held = machine.buckets.length_for(end), (begin + end) / 2
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


def _switches(comparison: Comparison) -> str:
    best = comparison.best_static
    if not any(trace.switches for trace in comparison.traces):
        return (
            f"No switch pays: the planner stays in {comparison.traces[0].layout[0]}, and {best.name} "
            "throughout is the best static layout."
        )
    spent = sum(comparison.adaptive.switch_s) / sum(comparison.adaptive.total_s)
    gain = comparison.gain(best)
    result = f"{percent(gain)} less" if gain >= 0 else f"{percent(-gain)} more"
    return (
        f"Switches and moves between groups take {percent(spent)} of the time; with them a rollout "
        f"takes {result} than in {best.name} throughout, the best static layout."
    )


def _pages(comparison: Comparison, machine: Machine) -> Iterator[str]:
    preempted = {x.name: count for x in comparison.systems if (count := sum(x.num_preempted))}
    if preempted and machine.memory is not None:
        told = ", ".join(f"{name} {count}" for name, count in preempted.items())
        pool = machine.memory.pool(machine.splits[0]) / GIB
        yield (
            f"The KV cache is too small for all sequences at once ({pool:.3g} GiB of a device): "
            f"sequences gave up their pages to be computed again later: {told}."
        )


def _prefill(comparison: Comparison) -> Iterator[str]:
    share = sum(comparison.adaptive.prefill_s) / sum(comparison.adaptive.total_s)
    if share >= 10 * SMALL:
        yield f"Prefill takes {percent(share)} of the time."


def of_experts(
    step_s: Callable[[Split, int], float], splits: Sequence[Split], running: Sequence[int]
) -> str:
    """A sentence for a model with experts: for how many running sequences another layout than the
    first is faster.

    Args:
      step_s: seconds of a decode step, by sequences running on the whole machine.
      splits: lowest TP first.
      running: ascending.
    """
    first = splits[0]
    best = {n: min(splits, key=lambda split: step_s(split, n)) for n in running}
    gains = [n for n in running if step_s(best[n], n) < (1 - FASTER) * step_s(first, n)]
    told = "Experts are on the same devices in every layout, and no switch moves one: "
    if not gains:
        return f"{told}in no layout is a step more than {percent(FASTER)} faster than in {first}."
    few, most = gains[0], gains[-1]
    slow, fast = 1e3 * step_s(first, few), 1e3 * step_s(best[few], few)
    told += (
        f"with {few:,} running a step takes {fast:.3g} ms in {best[few]} and {slow:.3g} in {first}"
    )
    more = [n for n in running if n > most]
    if not more:
        return f"{told}, and with {most:,} {best[most]} is the faster one still."
    return f"{told}; from {more[0]:,} running on no layout is more than {percent(FASTER)} faster than {first}."
