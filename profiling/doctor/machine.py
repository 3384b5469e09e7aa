"""Finds what a machine has: devices, memory, versions. Computes nothing on it."""

import os
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from platform import python_version

from pat_jax.common.devices import Device, idle_accelerators
from pat_jax.planning.memory import GIB
from pat_jax.profiling.cross_compile.compile import versions_of
from pat_jax.profiling.doctor.report import Finding
from pat_jax.version import __version__

PACKAGES = ("jax", "jaxlib", "flax", "jax-cuda12-plugin", "jax-cuda13-plugin", "libtpu")
DRIVER = Path("/proc/driver/nvidia/version")


def devices_found(devices: Sequence[Device]) -> Finding:
    """Returns the number, kind and memory of devices, and whether accelerators are unused."""
    kinds = Counter(device.device_kind for device in devices)
    platform = devices[0].platform
    each = [memory_of(device) for device in devices]
    words = ", ".join(f"{n} x {kind}" for kind, n in kinds.items())
    figures = {
        "platform": platform,
        "kinds": dict(kinds),
        "memory_bytes": each,
        "cores": os.cpu_count(),
    }
    idle = idle_accelerators(platform)
    if idle:
        trouble = f"JAX runs on {platform}, and the device files of {', '.join(idle)} are there"
        return Finding(f"{words}: {trouble}", figures, trouble)
    return Finding(f"{words}, {_memory(each)}", figures)


def _memory(each: Sequence[int | None]) -> str:
    if None in each:
        whole = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        return f"which share the host's {whole / GIB:.1f} GiB"
    least, most = (limit(x for x in each if x is not None) / GIB for limit in (min, max))
    return f"{least:.1f} GiB each" if most - least < 0.1 else f"{least:.1f} to {most:.1f} GiB each"


def memory_of(device: Device) -> int | None:
    """Returns the bytes that XLA may take of a device, or None if it reports none, as on a CPU."""
    return (device.memory_stats() or {}).get("bytes_limit")


def versions_found(devices: Sequence[Device]) -> Finding:
    """Returns the versions of the packages, and of the runtime and driver under them."""
    found = {"python": python_version(), "pat_jax": __version__, **versions_of(PACKAGES)}
    client = " ".join(str(devices[0].client.platform_version).split())
    if devices[0].platform != "cpu":
        found["runtime"] = client
    if DRIVER.is_file():
        found["driver"] = DRIVER.read_text(encoding="utf-8").splitlines()[0]
    return Finding(", ".join(f"{name} {number}" for name, number in found.items()), found)
