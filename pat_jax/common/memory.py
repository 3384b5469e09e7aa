"""The memory of this machine: its size, and returning freed memory to the system."""

import ctypes
import math
import os
import sys
from pathlib import Path

CGROUP = Path("/sys/fs/cgroup/memory.max")  # a container's limit, in bytes


def machine_memory() -> float:
    """Returns the bytes of memory that this process may use, or infinity if they are not known."""
    try:
        most = float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    except (AttributeError, OSError, ValueError):
        return math.inf
    try:
        return min(most, float(CGROUP.read_text()))
    except (OSError, ValueError):  # no container, or one without a limit
        return most


def give_back() -> None:
    """Returns freed memory to the system. Call it after freeing much, such as after compiling:
    glibc would keep it. On other systems it does nothing."""
    if sys.platform != "linux":
        return
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:  # other C libraries have none
        trim(0)
