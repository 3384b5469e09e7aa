"""What a model takes of devices that need not be there, by the engine's own layouts and accounts.

Nothing is compiled and no array is made: temporaries of programs are not known here, but for the
tenth of a device that `planning/memory.py` leaves to them.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import cast

from pat_jax.devices import Device
from pat_jax.errors import UserError
from pat_jax.memory import can_begin, without_room
from pat_jax.planning.memory import GIB
from pat_jax.profiling.absent_jobs import Order, Plant
from pat_jax.profiling.targets import Target, chips

MOST_DEVICES = 1024  # looked at for what would hold a model


@dataclass(frozen=True)
class PaperDevice:
    """What a mesh asks of a device."""

    id: int
    process_index: int  # the host
    platform: str = "gpu"  # no torus: only numbers of devices count here
    device_kind: str = "on paper"


def paper_devices(devices_per_host: int, num_hosts: int = 1) -> list[Device]:
    return [
        cast(Device, PaperDevice(host * devices_per_host + number, host))
        for host in range(num_hosts)
        for number in range(devices_per_host)
    ]


def on_paper(order: Order) -> Plant:
    target = order.target
    return Plant(order, paper_devices(target.devices_per_host, target.num_hosts))


def check_room(plant: Plant, name: str) -> None:
    """Some layout has to hold the model.

    Args:
      name: of the model.

    Raises:
      UserError: none does; says by how much, and what would.
    """
    memory, order = plant.memory, plant.order
    if has_room(plant):
        return
    best = min(memory.weights, key=memory.held)
    lacking = (memory.held(best) - memory.usable) / GIB
    training = f", training {memory.resident / GIB:.3g}" if order.config.train else ""
    found = next(what_fits(order), "nothing that is known here")
    raise UserError(
        f"option --model is {name!r}: no layout fits {order.target}; {best}, the "
        f"smallest, needs {memory.held(best) / GIB:.3g} GiB of a device (weights "
        f"{memory.weights[best] / GIB:.3g}{training}, KV cache {memory.pool(best) / GIB:.3g} for one "
        f"response of full length), {lacking:.3g} GiB more than the {memory.usable / GIB:.3g} that can "
        f"be used; {found} would fit."
    )


def has_room(plant: Plant) -> bool:
    """Whether a rollout can begin in some layout."""
    memory = plant.memory
    fitting = [
        split
        for split in memory.weights
        if split not in without_room(memory, plant.order.config.rollout)
    ]
    return can_begin(memory, fitting)


def what_fits(order: Order) -> Iterator[str]:
    """Changes with which it would fit, the smallest first: options, then larger machines."""
    for words, changed in _changes(order):
        if has_room(on_paper(changed)):
            yield words


def _changes(order: Order) -> Iterator[tuple[str, Order]]:
    config = order.config
    if config.rollout.weights == "auto":
        rollout = replace(config.rollout, weights="int8")
        yield "--weights int8", replace(order, config=replace(config, rollout=rollout))
    if config.train:
        without = replace(order, config=replace(config, train=False))
        yield "--train false (the rollout alone, trained elsewhere)", without
    for target in larger(order.target):
        yield str(target), replace(order, target=target)


def larger(target: Target) -> Iterator[Target]:
    """As many devices with more memory, then more of the same."""
    sizes = [*target.topology]
    for chip in sorted(chips().values(), key=lambda chip: chip.memory_bytes):
        is_alike = chip.platform == target.chip.platform
        if is_alike and chip.memory_bytes > target.chip.memory_bytes:
            shape = target.text.partition(":")[2]
            if chip.platform == "cuda" or chip.dimensions == target.chip.dimensions:
                yield Target.parse(f"{chip.name}:{shape}")
    while 2 * target.num_devices <= MOST_DEVICES:
        if target.chip.platform == "tpu":
            sizes[sizes.index(min(sizes))] *= 2
            shape = "x".join(map(str, sorted(sizes)))
        else:
            shape = f"{target.devices_per_host}x{2 * target.num_hosts}"
        target = Target.parse(f"{target.chip.name}:{shape}")
        yield target
