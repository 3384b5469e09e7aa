"""Prices the ways to carry the KV cache over a switch: what migrates, and what is recomputed."""

import numpy as np

from pat_jax.planning.latency.model import LatencyModel
from pat_jax.planning.latency.switch_costs import SwitchCosts
from pat_jax.planning.planner.priced import Costs
from pat_jax.planning.types import (
    MIGRATE_ALL,
    RECOMPUTE_ALL,
    WAYS,
    Carry,
    Load,
    Plan,
    Prediction,
    Split,
    recompute_below,
)

MOST_CUTS = 16  # quantiles of the context that are tried as `Plan.recompute_below`


def carried_seconds(
    latency: LatencyModel,
    source: Split,
    target: Split,
    load: Load,
    is_recomputed: np.ndarray,
    is_carried: np.ndarray | None = None,
    believed: tuple[float, float] = (1.0, 1.0),
) -> float:
    """Returns the seconds to carry the KV cache of every sequence of `load` from `source` to
    `target`.

    Args:
      is_recomputed: bool[running], the sequences to recompute; the others migrate.
      is_carried: bool[running], the sequences to carry at all; by default all.
      believed: predicted / profiled seconds of migrating, and of recomputing.
    """
    migrates = ~is_recomputed
    seconds = 0.0
    if is_carried is not None:
        migrates, is_recomputed = migrates & is_carried, is_recomputed & is_carried
    if migrates.any():
        fullest = int(np.bincount(load.replica[migrates]).max())
        mean_context = float(load.context[migrates].mean())
        count = int(migrates.sum())
        pages_s = float(latency.migrate(source, target, fullest, count, mean_context))
        seconds += believed[0] * pages_s
    if is_recomputed.any():
        rest = load.context[is_recomputed]
        longest = max(1, int(rest.max()))
        rows = float(rest.sum()) / (longest * target.dp)  # of the longest, as many tokens
        seconds += believed[1] * latency.recompute(target, rows, longest)
    return seconds


def cheapest_carry(
    latency: LatencyModel,
    source: Split,
    target: Split,
    load: Load,
    believed: tuple[float, float] = (1.0, 1.0),
) -> int:
    """Returns the value of `Plan.recompute_below` with the least predicted time to carry the KV
    cache.

    Migrating and recomputing both take seconds per page. Recomputing a page takes longer, the more
    context is before it. So of two sequences the shorter one is recomputed.
    """
    inner = np.quantile(load.context, np.linspace(0, 1, MOST_CUTS), method="higher")
    cuts = [MIGRATE_ALL, *np.unique(inner)[1:].tolist(), RECOMPUTE_ALL]
    seconds = [
        carried_seconds(latency, source, target, load, load.context < cut, believed=believed)
        for cut in cuts
    ]
    return int(cuts[int(np.argmin(seconds))])


def switch_plan(
    latency: LatencyModel,
    seen: SwitchCosts,
    costs: Costs,
    load: Load,
    pair: tuple[int, int],
    reshard_s: float,
) -> Plan:
    """Returns the plan of a switch now, with the cheapest way to carry the KV cache, without its
    saving.

    Args:
      pair: the indices of the source and target layouts in the tables.
      reshard_s: profiled seconds to reshard the weights.
    """
    i, j = pair
    source, target = (costs.tables.splits[k] for k in pair)
    only = costs.only_way(0, i, j)
    if only is None:
        below = cheapest_carry(latency, source, target, load, seen.ways)
    else:
        below = recompute_below(only)
    way: Carry = WAYS.get(below, "mixed")
    kv_s = carried_seconds(latency, source, target, load, load.context < below)
    cost = kv_s * seen.kv(way) + float(costs.tables.reshard[pair])
    return Plan(
        target,
        threshold=0,
        recompute_below=below,
        predicted_cost_s=cost,
        reason=f"costs {cost:.2f} s ({way})",
        prediction=Prediction(source, target, reshard_s, kv_s),
    )
