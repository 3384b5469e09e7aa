"""What memory devices have, and how much of it was in use."""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol

import jax

from pat_jax.common.devices import Device
from pat_jax.common.hosts.together import process_group
from pat_jax.common.memory import machine_memory
from pat_jax.planning.memory import GIB

MACHINE_SHARE = 1 / 4


class MemoryOption(Protocol):
    @property
    def device_memory_gib(self) -> float: ...


def memory_limit(config: MemoryOption, devices: Sequence[Device]) -> float:
    """Bytes that every one of `devices` has; infinite where neither they nor the options say."""
    if config.device_memory_gib:
        return config.device_memory_gib * GIB
    limits = [stats.get("bytes_limit", math.inf) for stats in _memory_stats(devices)]
    return min(process_group().gather("memory", min(limits)))


def cache_limit(config: MemoryOption, devices: Sequence[Device]) -> float:
    """Bytes of a device by which KV caches are sized.

    A CPU's devices have no memory of their own: each counts on its part of a quarter of the
    machine's. Its bursts read a contiguous copy of what they decode, and what is trained has to fit
    beside both.
    """
    limit = memory_limit(config, devices)
    if not math.isinf(limit) or devices[0].platform != "cpu":
        return limit
    own = sum(device.process_index == jax.process_index() for device in devices)
    return min(
        process_group().gather("machine memory", MACHINE_SHARE * machine_memory() / max(1, own))
    )


def peak_bytes(devices: Iterable[Device]) -> int | None:
    """The most of any device that was in use since the process began; None: no device says."""
    peaks = [stats.get("peak_bytes_in_use") for stats in _memory_stats(devices)]
    return max((peak for peak in peaks if peak is not None), default=None)


def _memory_stats(devices: Iterable[Device]) -> list[Mapping[str, int]]:
    """Of the devices of this process, which alone tell it."""
    own = jax.process_index()
    return [device.memory_stats() or {} for device in devices if device.process_index == own]
