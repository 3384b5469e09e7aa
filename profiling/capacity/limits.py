"""Sentences on what keeps a rollout from being faster, from a plan's computed seconds."""

from collections.abc import Callable, Sequence
from itertools import pairwise, product

from pat_jax.common.text_table import percent
from pat_jax.planning.types import Split
from pat_jax.profiling.simulate.comparison import Comparison
from pat_jax.profiling.simulate.machine import Machine

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
