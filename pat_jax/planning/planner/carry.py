"""What carrying the KV cache over a switch costs, and which sequences migrate or are recomputed."""

import numpy as np

from pat_jax.planning.latency.model import LatencyModel
from pat_jax.planning.types import MIGRATE_ALL, RECOMPUTE_ALL, Load, Split

MOST_CUTS = 16  # ways to divide the sequences that are looked at


def carry_seconds(
    latency: LatencyModel,
    source: Split,
    target: Split,
    load: Load,
    recompute_below: int,
    believed: tuple[float, float] = (1.0, 1.0),
) -> float:
    """Seconds to bring every sequence of `load` along: see `Plan.recompute_below`.

    Args:
      believed: over profiled seconds of migrating and of recomputing.
    """
    is_recomputed = load.context < recompute_below
    return carried_seconds(latency, source, target, load, is_recomputed, believed=believed)


def carried_seconds(
    latency: LatencyModel,
    source: Split,
    target: Split,
    load: Load,
    is_recomputed: np.ndarray,
    is_carried: np.ndarray | None = None,
    believed: tuple[float, float] = (1.0, 1.0),
) -> float:
    """As `carry_seconds`, sequence by sequence.

    Args:
      is_recomputed: bool[live]; the others migrate.
      is_carried: bool[live], those that are brought along at all; all where not given.
    """
    migrates, seconds = ~is_recomputed, 0.0
    if is_carried is not None:
        migrates, is_recomputed = migrates & is_carried, is_recomputed & is_carried
    if migrates.any():
        fullest = int(np.bincount(load.group[migrates]).max())
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
    """The cheapest `Plan.recompute_below`.

    Both cost by the page, and a page of a prefill the more the longer the context before it: of two
    sequences the shorter one is the one to recompute.
    """
    inner = np.quantile(load.context, np.linspace(0, 1, MOST_CUTS), method="higher")
    cuts = [MIGRATE_ALL, *np.unique(inner)[1:].tolist(), RECOMPUTE_ALL]
    seconds = [carry_seconds(latency, source, target, load, cut, believed) for cut in cuts]
    return int(cuts[int(np.argmin(seconds))])
