"""Whether a profile still holds: what the warm-up of a run takes, against what it says."""

from collections import defaultdict
from collections.abc import Mapping
from statistics import median
from typing import Any

from pat_jax.planning.types import Split

NOISE = 1.1  # times longer or shorter: one run differs as much from the next
Table = Mapping[Any, float]  # seconds, by a tuple with one layout in it, or the two of a switch
Layouts = tuple[Split, ...]


def changes(known: Table, again: Table) -> dict[Layouts, float]:
    """By what factor the times of a layout, or of a switch, differ from a table's by more than
    noise.

    All times of one are taken to have changed alike, by the median of those that were run again:
    one odd run changes nothing where there are several.

    Args:
      again: seconds of some entries of `known`, measured now.
    """
    ratios = defaultdict(list)
    for key, seconds in again.items():
        ratios[_layouts(key)].append(seconds / known[key])
    factors = {layouts: median(seen) for layouts, seen in ratios.items()}
    return {k: factor for k, factor in factors.items() if not 1 / NOISE <= factor <= NOISE}


def rescaled(known: Table, again: Table, sample: Split | None = None) -> dict[Any, float]:
    """The `known` seconds, with those put right that have changed.

    Args:
      sample: the layout that stands for those of which nothing was run again.
    """
    factors, ran = changes(known, again), set(map(_layouts, again))
    for key in known:
        if sample is not None and (layouts := _layouts(key)) not in ran:
            factors[layouts] = factors.get((sample,), 1.0)
    return {key: seconds * factors.get(_layouts(key), 1.0) for key, seconds in known.items()}


def describe(name: str, known: Table, again: Table) -> list[str]:
    """A line for each change, for the log."""
    return [
        f"profile: {name} of {_named(layouts)} takes {factor:.2f} times as long now"
        for layouts, factor in changes(known, again).items()
    ]


def _named(layouts: Layouts) -> str:
    if len(layouts) > len(set(layouts)):
        return f"{layouts[0]}, between its replicas,"
    return " to ".join(map(str, layouts))


def _layouts(key: tuple) -> Layouts:
    return tuple(part for part in key if isinstance(part, Split))
