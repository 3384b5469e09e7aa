"""Memory that was freed, given back to the system."""

import ctypes


def give_back() -> None:
    """To be called where much has been freed that is not needed soon: after a compiler, after measurements.

    The C library of Linux keeps what was freed for allocations to come, in small pieces between others.
    Elsewhere nothing is done.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
