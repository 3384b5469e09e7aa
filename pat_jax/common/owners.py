"""The processes that own some devices, and values that only these processes have.

A model may have the devices of some processes alone. The other processes run no program of it, and
wait for its results where they need them. Knows devices by their `process_index`. Does not know
which models there are.
"""

from collections.abc import Iterable
from typing import TypeVar

from pat_jax.common.devices import Device
from pat_jax.common.hosts.together import process_group

T = TypeVar("T")


def owners(devices: Iterable[Device]) -> list[int]:
    """Returns the processes that own some of these devices, ascending."""
    return sorted({device.process_index for device in devices})


def is_absent(devices: Iterable[Device]) -> bool:
    """Returns whether only other processes of this run own these devices."""
    us = process_group()
    own = owners(devices)
    return len(own) > 0 and not us.is_alone and us.index not in own


def have_all(devices: Iterable[Device]) -> bool:
    """Returns whether each process of this run owns some of these devices."""
    us = process_group()
    return us.is_alone or len(owners(devices)) == us.count


def known_to_all(name: str, devices: Iterable[Device], value: T) -> T:
    """Returns in every process the `value` of the first owner of these devices. All processes must
    call it, in the same order, with the same `name`. Where each process owns some of the devices,
    it returns `value` at once, as all have computed the same."""
    if have_all(devices):
        return value
    us = process_group()
    first = owners(devices)[0]
    told = us.gather(name, value if us.index == first else None)[first]
    assert told is not None, f"{name}: process {first} told nothing"
    return told
