"""The memory of devices, and how much of it was in use."""

import math
from collections.abc import Iterable, Mapping, Sequence

import jax

from pat_jax.common.devices import Device
from pat_jax.common.hosts.together import process_group
from pat_jax.common.memory import machine_memory
from pat_jax.planning.memory import GIB

MACHINE_SHARE = 1 / 4


def memory_limit(asked_gib: float, devices: Sequence[Device]) -> float:
    """Returns the memory of the smallest device in bytes, or `asked_gib` if that is not 0. It is
    infinite if neither is known."""
    if asked_gib:
        return asked_gib * GIB
    limits = [stats.get("bytes_limit", math.inf) for stats in _memory_stats(devices)]
    return min(process_group().gather("memory", min(limits)))


def cache_limit(asked_gib: float, devices: Sequence[Device]) -> float:
    """Returns the memory of a device, in bytes, from which the sizes of KV caches are computed.

    CPU devices have no memory of their own, so a quarter of the machine's memory is divided among
    them. The rest is for the contiguous copies of the cache that their bursts read, and for
    training.
    """
    limit = memory_limit(asked_gib, devices)
    if not math.isinf(limit) or devices[0].platform != "cpu":
        return limit
    own = sum(device.process_index == jax.process_index() for device in devices)
    return min(
        process_group().gather("machine memory", MACHINE_SHARE * machine_memory() / max(1, own))
    )


def peak_bytes(devices: Iterable[Device]) -> int | None:
    """Returns the peak bytes used on any device since the process began; None if unknown."""
    peaks = [stats.get("peak_bytes_in_use") for stats in _memory_stats(devices)]
    return max((peak for peak in peaks if peak is not None), default=None)


def _memory_stats(devices: Iterable[Device]) -> list[Mapping[str, int]]:
    """Statistics of this process's devices, the only ones that report them."""
    own = jax.process_index()
    return [device.memory_stats() or {} for device in devices if device.process_index == own]
