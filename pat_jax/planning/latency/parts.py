"""The latency model of some of a machine's devices, from that of all.

Knows layouts. Does not know where devices are.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from pat_jax.planning.latency.model import TABLES, LatencyModel
from pat_jax.planning.types import Split


def of_part(whole: LatencyModel, ratio: int, widest: int) -> LatencyModel:
    """Returns the model of one of `ratio` equal parts of the devices.

    A replica takes the same steps wherever it is: dp2tp2 on four devices takes those of dp4tp2 on
    eight, with as many rows in a replica. The same holds for switches, which move what replicas of
    either layout have. Entries of layouts that the part has not are left out. This is not so for
    experts, which compute the rows of all replicas.

    Args:
      widest: most devices of a replica.
    """

    def table(entries: Mapping[Any, float]) -> dict[Any, float]:
        return {
            tuple(_of_part(x, ratio) if isinstance(x, Split) else x for x in key): seconds
            for key, seconds in entries.items()
            if all(has(x) for x in key if isinstance(x, Split))
        }

    def has(split: Split) -> bool:
        return split.dp % ratio == 0 and split.tp <= widest

    tables: dict[str, Any] = {name: table(getattr(whole, name)) for name in TABLES}
    return replace(whole, **tables)


def _of_part(split: Split, ratio: int) -> Split:
    return Split(split.dp // ratio, split.tp)
