"""Computes a model's memory on devices that need not be here, by the engine's own formulas.

Nothing is compiled and no array is made. Temporaries of programs are unknown here:
`planning/memory.py` leaves a tenth of a device to them.
"""

from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

from pat_jax.common.chips import chips
from pat_jax.common.errors import UserError
from pat_jax.layout.buckets import largest_length
from pat_jax.models.config import ModelConfig
from pat_jax.planning.memory import GIB, MemoryModel
from pat_jax.planning.types import Split
from pat_jax.profiling.cross_compile.target_build import Order, TargetBuild
from pat_jax.profiling.predict.targets import Target, paper_devices

DEPTHS = (1, 2)  # layers of the models from which deeper ones are extrapolated
MOST_DEVICES = 256  # most devices of a target that is suggested


def by_arithmetic(order: Order) -> TargetBuild:
    return TargetBuild(order, paper_devices(order.target))


def needs_of(order: Order) -> MemoryModel:
    """Returns the memory that each layout needs if no other is used, see `memory_alone`. Bytes are
    affine in the number of layers. So they are extrapolated from two shallow models, because a deep
    one takes long to trace. If only some layers have experts, or other roles have models of their
    own depth, the whole model is traced."""
    if order.others or not has_equal_layers(order.model):
        return by_arithmetic(order).alone
    a, b = (replace(order.model, num_layers=layers) for layers in DEPTHS)
    small, large = (by_arithmetic(replace(order, model=model)).alone for model in (a, b))

    def whole(low: int, high: int) -> int:
        per_layer = (high - low) // (b.num_layers - a.num_layers)
        return low + per_layer * (order.model.num_layers - a.num_layers)

    return replace(
        small,
        resident=whole(small.resident, large.resident),
        weights={split: whole(n, large.weights[split]) for split, n in small.weights.items()},
        page={split: whole(n, large.page[split]) for split, n in small.page.items()},
    )


def has_equal_layers(model: ModelConfig) -> bool:
    """Returns whether all layers have experts, or none: bytes are then affine in the layers."""
    return not (model.sparse_layers and model.has_mlp)


def nearest(needs: MemoryModel) -> Split:
    """Returns the layout that needs the least memory."""
    return min(needs.weights, key=needs.held)


def check_room(order: Order, name: str) -> None:
    """Raises UserError if no layout has room for the model; the sentence says how much is missing,
    and what would fit."""
    needs = needs_of(order)
    best = nearest(needs)
    if needs.held(best) <= needs.usable:
        return
    lacking = (needs.held(best) - needs.usable) / GIB
    training = f", training {needs.resident / GIB:.3g}" if order.run.trains else ""
    drafts = f", draft model {needs.drafted(best) / GIB:.3g}" if order.draft_model else ""
    *others, last = list(what_fits(order)) or ["nothing that is known here"]
    advice = f"{', '.join(others)} or {last}" if others else last
    raise UserError(
        f"option --model is {name!r}: no layout fits {order.target}; {best}, the smallest, needs "
        f"{needs.held(best) / GIB:.3g} GiB of a device (weights {needs.weights[best] / GIB:.3g}"
        f"{training}, KV cache {needs.pool(best) / GIB:.3g} for one response of full length{drafts}), "
        f"{lacking:.3g} GiB more than the {needs.usable / GIB:.3g} that can be used; "
        f"{advice} would fit."
    )


def has_room(order: Order) -> bool:
    """Returns whether some layout fits into the memory of its devices."""
    needs = needs_of(order)
    return needs.held(nearest(needs)) <= needs.usable


def what_fits(order: Order) -> Iterator[str]:
    """Yields the changes with which the model would fit into memory: the smallest of each kind."""
    for kind in _changes(order):
        for words, changed in kind:
            if has_room(changed):
                yield words
                break


def _changes(order: Order) -> Iterator[Iterable[tuple[str, Order]]]:
    run = order.run
    target = order.target

    def of_rollout(**options: Any) -> Order:
        return replace(order, run=replace(run, rollout=replace(run.rollout, **options)))

    if run.rollout.weights == "auto":
        yield [("--weights int8", of_rollout(weights="int8"))]
    if (longest := _longest_response(order)) > 0:
        words = f"--max_completion_length {longest}"
        yield [(words, of_rollout(max_completion_length=longest))]
    if run.trains:
        without = replace(order, run=replace(run, trains=False))
        yield [("--train false (the rollout alone, trained elsewhere)", without)]
    for machines in (roomier(target), larger(target)):
        yield (
            (str(x), Order.of(x, run, order.model, order.depths, order.draft_model, order.others))
            for x in machines
        )


def _longest_response(order: Order) -> int:
    """Returns the tokens of the longest response that finds pages; 0 or less if none does."""
    needs = needs_of(order)
    rollout = order.run.rollout
    best = nearest(needs)
    texts = needs.draft_sources[best]
    length = largest_length(rollout.max_length, rollout.min_length)
    left = needs.usable - needs.resident - needs.weights[best] - (needs.drafted(best) - texts)
    unsplit = max(needs.page.values())  # bytes that pools grow by
    pages = unsplit // needs.page[best]
    texts_each = texts / length * pages * rollout.page_size  # which grow with the pages
    room = int(left // (unsplit + texts_each)) * pages - 1  # without NULL_PAGE
    whole = room * rollout.page_size // rollout.min_length * rollout.min_length
    return whole - rollout.max_prompt_length


def roomier(target: Target) -> Iterator[Target]:
    """Yields targets of as many devices with more memory, the smallest memory first."""
    shape = target.text.partition(":")[2]
    for chip in sorted(chips().values(), key=lambda chip: chip.memory_bytes):
        of_a_kind = chip.platform == target.chip.platform
        has_that_shape = chip.platform == "cuda" or chip.dimensions == target.chip.dimensions
        if of_a_kind and has_that_shape and chip.memory_bytes > target.chip.memory_bytes:
            yield Target.parse(f"{chip.name}:{shape}")


def larger(target: Target) -> Iterator[Target]:
    """Yields targets with more of the same devices: twice as many each time."""
    sizes = [*target.topology]
    while 2 * target.num_devices <= MOST_DEVICES:
        if target.chip.platform == "tpu":
            sizes[sizes.index(min(sizes))] *= 2
            shape = "x".join(map(str, sorted(sizes)))
        else:
            shape = f"{target.devices_per_host}x{2 * target.num_hosts}"
        target = target.resized(shape)
        yield target
