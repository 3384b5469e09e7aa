"""Memory that was freed, given back to the system."""

import ctypes
import sys


def give_back() -> None:
    """To be called where much has been freed that is not needed soon: after a compiler, after measurements.

    The C library of Linux keeps what was freed for allocations to come, in small pieces between others.
    Elsewhere this does nothing.
    """
    if sys.platform != "linux":
        return
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:  # other C libraries have none
        trim(0)
