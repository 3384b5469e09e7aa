"""What carrying the KV cache over a switch costs, and which sequences migrate or are recomputed."""

import numpy as np

from pat_jax.planning.latency import LatencyModel
from pat_jax.planning.types import MIGRATE_ALL, RECOMPUTE_ALL, Load, Split

MOST_CUTS = 16  # ways to divide the sequences that are looked at


def carry_seconds(
    latency: LatencyModel, source: Split, target: Split, load: Load, recompute_below: int
) -> float:
    """Seconds to bring every sequence of `load` along: see `Plan.recompute_below`."""
    migrates = load.context >= recompute_below
    seconds = 0.0
    if migrates.any():
        fullest = int(np.bincount(load.group[migrates]).max())
        mean_context = float(load.context[migrates].mean())
        count = int(migrates.sum())
        seconds += float(latency.migrate(source, target, fullest, count, mean_context))
    if not migrates.all():
        rest = load.context[~migrates]
        seconds += latency.recompute(target, -(-len(rest) // target.dp), int(rest.max()))
    return seconds


def cheapest_carry(
    latency: LatencyModel, source: Split, target: Split, load: Load
) -> tuple[int, float]:
    """The cheapest `recompute_below`, and its seconds.

    A prefill lasts as long as its longest sequence, an exchange as long as all its pages together:
    of two sequences the shorter one is the one to recompute.
    """
    inner = np.quantile(load.context, np.linspace(0, 1, MOST_CUTS), method="higher")
    cuts = [MIGRATE_ALL, *np.unique(inner)[1:].tolist(), RECOMPUTE_ALL]
    seconds = [carry_seconds(latency, source, target, load, cut) for cut in cuts]
    best = int(np.argmin(seconds))
    return int(cuts[best]), seconds[best]
