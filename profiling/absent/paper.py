"""What a model takes of devices that need not be there, by the engine's own layouts and accounts.

Nothing is compiled and no array is made: temporaries of programs are not known here, but for the
tenth of a device that `planning/memory.py` leaves to them.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import cast

from pat_jax.devices import Device
from pat_jax.engine.buckets import Buckets
from pat_jax.engine.catalogue import pages_per_group
from pat_jax.errors import UserError
from pat_jax.planning.memory import GIB, USABLE, MemoryModel
from pat_jax.planning.types import Split
from pat_jax.profiling.absent.jobs import Order, Plant
from pat_jax.profiling.costs.targets import Target, chips

DEPTHS = (1, 2)  # layers of the models that tell what deeper ones need
MOST_DEVICES = 256  # looked at for what would hold a model


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


@dataclass(frozen=True)
class Needs:
    """The least bytes of a device that a rollout takes in each layout."""

    resident: int  # of training
    weights: Mapping[Split, int]
    pool: Mapping[Split, int]  # of pages for one response of full length

    def of(self, split: Split) -> int:
        return self.resident + self.weights[split] + self.pool[split]

    @property
    def smallest(self) -> Split:
        return min(self.weights, key=self.of)


def needs_of(order: Order) -> Needs:
    """Every layout gets as many pages as the one that has to have most of them.

    Bytes are affine in the layers, so that two shallow models tell those of a deep one, which takes
    long to trace.
    """
    a, b = (replace(order.model, num_layers=layers) for layers in DEPTHS)
    small, large = (on_paper(replace(order, model=model)) for model in (a, b))
    plant, rollout = small, order.config.rollout
    pages = pages_per_group(
        plant.layouts,
        buckets_of(order, tuple(plant.layouts)),
        rollout.page_size,
        unsplit=rollout.kv_pages,
        most=0,
    )

    def whole(bytes_of: Callable[[MemoryModel], int]) -> int:
        low, high = bytes_of(small.memory), bytes_of(large.memory)
        per_layer = (high - low) // (b.num_layers - a.num_layers)
        return low + per_layer * (order.model.num_layers - a.num_layers)

    return Needs(
        whole(lambda memory: memory.resident),
        {split: whole(lambda memory, s=split: memory.weights[s]) for split in plant.layouts},
        {split: n * whole(lambda memory, s=split: memory.page[s]) for split, n in pages.items()},
    )


def buckets_of(order: Order, splits: Sequence[Split]) -> Buckets:
    """The shapes that a run's programs are compiled for."""
    rollout = order.config.rollout
    return Buckets.build(
        splits,
        capacity=rollout.prompts_per_step * rollout.num_generations,
        min_rows=rollout.min_rows,
        min_length=rollout.min_length,
        max_length=rollout.max_prompt_length + rollout.max_completion_length,
    )


def usable(order: Order) -> float:
    """Bytes of a device that a run may count on."""
    given = order.config.rollout.device_memory_gib
    return USABLE * (given * GIB if given else order.target.chip.memory_bytes)


def check_room(order: Order, name: str) -> None:
    """Some layout has to hold the model.

    Args:
      name: of the model.

    Raises:
      UserError: none does; says by how much, and what would.
    """
    needs, available = needs_of(order), usable(order)
    best = needs.smallest
    if needs.of(best) <= available:
        return
    lacking = (needs.of(best) - available) / GIB
    training = f", training {needs.resident / GIB:.3g}" if order.config.train else ""
    found = next(what_fits(order), None)
    raise UserError(
        f"option --model is {name!r}: no layout fits {order.target}; {best}, the smallest, needs "
        f"{needs.of(best) / GIB:.3g} GiB of a device (weights {needs.weights[best] / GIB:.3g}"
        f"{training}, KV cache {needs.pool[best] / GIB:.3g} for one response of full length), "
        f"{lacking:.3g} GiB more than the {available / GIB:.3g} that can be used; "
        + (f"{found} would fit." if found else "nothing that is known here would fit.")
    )


def has_room(order: Order) -> bool:
    """Whether a rollout can begin in some layout."""
    needs = needs_of(order)
    return needs.of(needs.smallest) <= usable(order)


def what_fits(order: Order) -> Iterator[str]:
    """Changes with which it would fit, the smallest first: options, then larger machines."""
    for words, changed in _changes(order):
        if has_room(changed):
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
        yield str(target), Order.of(target, config, order.model, order.depths)


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
