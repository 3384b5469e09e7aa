"""Chooses the devices of a run, and sets what JAX reads when it looks for them."""

import contextlib
import ctypes
import os
import platform
from collections.abc import Mapping, Sequence
from glob import glob
from importlib.util import find_spec
from pathlib import Path
from typing import TypeAlias

import jax

from pat_jax.common.errors import UserError
from pat_jax.common.hosts.together import process_group

Device: TypeAlias = jax.Device  # pyright: ignore[reportInvalidTypeForm]  # jaxlib has no stubs

HOST_MEMORY = "pinned_host"  # devices read and write it directly
CACHE_DIR = Path(os.environ.get("PAT_JAX_CACHE", Path.home() / ".cache" / "pat_jax" / "xla"))
PROFILE_DIR = CACHE_DIR.parent / "profiles"  # profiles of this machine
KEPT_DIR = PROFILE_DIR / "kept"  # profiles that runs have measured at their start
PLAN_DIR = CACHE_DIR.parent / "plans"  # programs compiled for other machines

# By platform: the modules of JAX's plug-ins, and patterns of the files that its devices have.
_PLATFORMS: Mapping[str, tuple[Sequence[str], Sequence[str]]] = {
    "tpu": (("libtpu",), ("/dev/accel*", "/dev/vfio/[0-9]*")),
    "cuda": (
        ("jax_cuda12_plugin", "jax_cuda13_plugin"),
        ("/dev/nvidia[0-9]*", "/dev/nvidiactl", "/dev/dxg"),
    ),
    "rocm": (("jax_rocm60_plugin", "jax_rocm7_plugin"), ("/dev/kfd",)),
}


def configure(num_devices: int) -> Sequence[Device]:
    """Returns the devices of this run, of all processes together. Call it before anything else asks
    JAX for devices. Raises UserError if there are fewer than asked for.

    A CPU appears as several devices: `num_devices`, or the largest power of two up to min(cores,
    8). They share all cores. If there are several, each computes a matrix product on one core: a
    product that waited for threads which wait in a collective would never end. In a program that
    has used JAX before, the number of CPU devices stays as it was.
    """
    processes = process_group().count
    if num_devices % processes:
        raise UserError(
            f"option --devices is {num_devices}: expected a multiple of the {processes} processes of this "
            "run, or 0 for all."
        )
    _set_up(num_devices // processes or 1 << (min(num_cores(), 8).bit_length() - 1))
    devices = jax.devices()
    if num_devices > len(devices):
        here = "this machine has" if processes == 1 else "the machines of this run have"
        raise UserError(
            f"option --devices is {num_devices}: {here} {len(devices)} "
            f"{devices[0].platform} devices; choose at most that many, or 0 for all."
        )
    if processes > 1 and 0 < num_devices < len(devices):
        raise UserError(
            f"option --devices is {num_devices}: {processes} processes use all of their {len(devices)} "
            "devices; leave the option out."
        )
    if devices[0].platform == "cpu":
        _keep_freed_memory()
    return devices[: num_devices or len(devices)]


def _set_up(num_cpu: int) -> None:
    """Sets what JAX reads when it looks for devices, and the folder of its compilation cache."""
    os.environ.setdefault("NPROC", str(max(num_cpu, num_cores())))  # XLA sizes its pool by it
    # Flags only: XLA stops reading at the first word that is not a flag.
    flags = "--xla_cpu_multi_thread_eigen=false"
    if num_cpu > 1 and flags not in (given := os.environ.get("XLA_FLAGS", "")):
        os.environ["XLA_FLAGS"] = f"{flags} {given}".strip()
    # Looking for a TPU's metadata server takes minutes where there is none.
    os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
    asked_for = jax.config.jax_platforms  # pyright: ignore[reportAttributeAccessIssue]
    if asked_for is None and (platforms := platforms_here()):
        jax.config.update("jax_platforms", platforms)
    with contextlib.suppress(RuntimeError):  # raised if the program has used JAX before
        jax.config.update("jax_num_cpu_devices", num_cpu)
    jax.config.update("jax_compilation_cache_dir", str(CACHE_DIR))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)


def platforms_here() -> str | None:
    """Returns the platforms that JAX should look for, or None for all that are installed. The extra
    `plan` installs compilers for accelerators that are not here. JAX would start each of them,
    which has taken minutes."""
    installed = [name for name, (modules, _) in _PLATFORMS.items() if any(map(find_spec, modules))]
    here = [name for name in installed if any(glob(sign) for sign in _PLATFORMS[name][1])]
    return None if here == installed else ",".join([*here, "cpu"])


def idle_accelerators(platform: str) -> list[str]:
    """Returns the kinds of accelerators that have device files, if JAX uses a CPU without being
    asked to."""
    if platform != "cpu" or os.environ.get("JAX_PLATFORMS"):
        return []
    return [name for name, (_, signs) in _PLATFORMS.items() if any(map(glob, signs))]


def _keep_freed_memory() -> None:
    """Makes the C library keep memory that XLA's CPU devices free, as XLA keeps a GPU's memory.

    By default glibc returns large blocks to the kernel, which clears each page at its next use.
    This has taken longer than writing a switch's weights. Other C libraries have no such setting.
    """
    if platform.libc_ver()[0] == "glibc":
        mmap_max, trim_threshold = -4, -1  # M_MMAP_MAX and M_TRIM_THRESHOLD of malloc.h
        libc = ctypes.CDLL(None)
        libc.mallopt(mmap_max, 0)
        libc.mallopt(trim_threshold, -1)  # never


def num_cores() -> int:
    """Returns the number of cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def in_host_memory(sharding: jax.sharding.NamedSharding) -> jax.sharding.NamedSharding:
    """Returns the sharding in host memory, or unchanged for devices that this machine lacks."""
    devices = sharding.mesh.devices
    assert devices is not None  # the mesh is one of devices, not of sizes alone
    is_on_paper = not hasattr(devices.flat[0], "client")
    return sharding if is_on_paper else sharding.with_memory_kind(HOST_MEMORY)


def has_host_memory(devices: Sequence[Device]) -> bool:
    """Returns whether arrays of these devices may lie in host memory."""
    return all(
        HOST_MEMORY in [memory.kind for memory in device.addressable_memories()]
        for device in devices
    )
