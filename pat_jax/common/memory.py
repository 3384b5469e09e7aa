"""The memory of this machine: how much it has, and giving back what was freed."""

import ctypes
import math
import os
import sys
from pathlib import Path

CGROUP = Path("/sys/fs/cgroup/memory.max")  # of a container


def machine_memory() -> float:
    """Bytes that this process may have of the machine's; infinite where the system does not say."""
    try:
        most = float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    except (AttributeError, OSError, ValueError):
        return math.inf
    try:
        return min(most, float(CGROUP.read_text()))
    except (OSError, ValueError):  # it has no container, or one without a limit
        return most


def give_back() -> None:
    """To be called where much has been freed that is not needed soon, such as after a compiler. The
    C library of Linux keeps it, in small pieces between others; elsewhere this does nothing."""
    if sys.platform != "linux":
        return
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:  # other C libraries have none
        trim(0)
