"""Decides where the models of a run wait while no stage needs them.

Knows options and the room of rollouts. Does not know what the models are.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

from pat_jax.common.devices import HOST_MEMORY, Device, has_host_memory
from pat_jax.common.rules import require
from pat_jax.config.run import RunConfig
from pat_jax.training.rest import has_more_room


def with_rest(config: RunConfig, rest: str) -> RunConfig:
    return replace(config, roles=replace(config.roles, rest=rest))


def settled_rest(
    config: RunConfig, devices: Sequence[Device], room: Callable[[RunConfig], float]
) -> tuple[RunConfig, str]:
    """Returns the options with `--roles.rest` settled, and a line on it, empty if nothing was to be
    decided.

    Args:
      room: returns for options how many of the longest sequences have room in the KV cache.

    Raises:
      OptionError: models are to wait in the host's memory, which the devices do not have.
    """
    has_memory, asked = has_host_memory(devices), config.roles.rest
    require(
        asked != "host" or has_memory,
        "roles.rest",
        asked,
        f"device or auto on devices of platform {devices[0].platform}, which know no {HOST_MEMORY} memory",
    )
    if asked != "auto":
        return config, ""
    resident = with_rest(config, "device")
    away = with_rest(config, "host")
    if not (config.learns and has_memory) or math.isinf(here := room(resident)):
        return resident, ""
    sequences = config.rollout.prompts_per_step * config.rollout.num_generations
    if here >= sequences or not has_more_room(here, there := room(away), sequences):
        return resident, ""
    return away, _words(here, there, sequences)


def _words(here: float, there: float, sequences: int) -> str:
    return (
        f"models wait in the host's memory between their stages (--roles.rest auto): the KV cache has room for "
        f"{min(int(there), sequences):,} of {sequences:,} responses at full length, and for {int(here):,} beside "
        "models that stay on the devices"
    )
