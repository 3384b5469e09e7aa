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
    """Returns the bytes of the smallest device, or `asked_gib` unless that is 0. They are infinite
    if neither is known."""
    if asked_gib:
        return asked_gib * GIB
    limits = [stats.get("bytes_limit", math.inf) for stats in _memory_stats(devices)]
    return min(process_group().gather("memory", min(limits)))


def cache_limit(asked_gib: float, devices: Sequence[Device]) -> float:
    """Returns the bytes of a device's memory from which the sizes of KV caches are computed.

    CPU devices have no memory of their own, so a quarter of the machine's memory is divided among
    them. Their bursts also read a contiguous copy of the cache, and training has to fit beside
    both.
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
