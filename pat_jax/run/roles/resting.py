"""Decides where the models of a run wait while no stage needs them.

Knows the room of rollouts. Does not know what the models are.
"""

import math
from collections.abc import Callable, Sequence
from typing import Literal

from pat_jax.common.devices import HOST_MEMORY, Device, has_host_memory
from pat_jax.common.rules import require
from pat_jax.training.rest import has_more_room

Rest = Literal["device", "host"]


def settled_rest(
    asked: Literal["auto", "device", "host"],
    devices: Sequence[Device],
    room: Callable[[Rest], float],
    *,
    sequences: int,
    learns: bool,
) -> tuple[Rest, str]:
    """Returns where models wait, and a line for the user if that was decided here, else "".

    Args:
      asked: `--roles.rest`.
      room: returns how many of the longest sequences have room in the KV cache if models wait
        there.
      sequences: responses of an iteration.
      learns: whether anything is trained.

    Raises:
      OptionError: models are to wait in the host's memory, which the devices do not have.
    """
    has_memory = has_host_memory(devices)
    require(
        asked != "host" or has_memory,
        "roles.rest",
        asked,
        f"device or auto on devices of platform {devices[0].platform}, which know no {HOST_MEMORY} memory",
    )
    if asked != "auto":
        return asked, ""
    if not (learns and has_memory) or math.isinf(here := room("device")):
        return "device", ""
    if here >= sequences or not has_more_room(here, there := room("host"), sequences):
        return "device", ""
    return "host", _words(here, there, sequences)


def _words(here: float, there: float, sequences: int) -> str:
    return (
        f"models wait in the host's memory between their stages (--roles.rest auto): the KV cache has room for "
        f"{min(int(there), sequences):,} of {sequences:,} responses at full length, and for {int(here):,} beside "
        "models that stay on the devices"
    )
