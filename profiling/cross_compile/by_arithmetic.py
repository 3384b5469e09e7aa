"""Computes a model's memory on devices that need not be here, by the engine's own formulas.

Nothing is compiled and no array is made. Temporaries of programs are unknown here:
`planning/memory.py` leaves a tenth of a device to them.
"""

from dataclasses import replace

from pat_jax.common.errors import UserError
from pat_jax.models.config import ModelConfig
from pat_jax.planning.memory import GIB, MemoryModel
from pat_jax.planning.types import Split
from pat_jax.profiling.cross_compile.target_build import Order, TargetBuild
from pat_jax.profiling.predict.targets import paper_devices

DEPTHS = (1, 2)  # layers of the models from which deeper ones are extrapolated


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
    """Raises UserError if no layout has room for the model: how much memory is lacking."""
    needs = needs_of(order)
    best = nearest(needs)
    if needs.held(best) <= needs.usable:
        return
    lacking = (needs.held(best) - needs.usable) / GIB
    training = f", training {needs.resident / GIB:.3g}" if order.run.trains else ""
    drafts = f", draft model {needs.drafted(best) / GIB:.3g}" if order.draft_model else ""
    raise UserError(
        f"option --model is {name!r}: no layout fits {order.target}; {best}, the smallest, needs "
        f"{needs.held(best) / GIB:.3g} GiB of a device (weights {needs.weights[best] / GIB:.3g}"
        f"{training}, KV cache {needs.pool(best) / GIB:.3g} for one response of full length{drafts}), "
        f"{lacking:.3g} GiB more than the {needs.usable / GIB:.3g} that can be used; "
        "take a larger --target, --train false, --weights int8 or a shorter --max_completion_length."
    )
