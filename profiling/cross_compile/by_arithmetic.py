"""Computes a model's memory on devices that need not be here, by the engine's own formulas.

Nothing is compiled and no array is made. Temporaries of programs are unknown here:
`planning/memory.py` leaves a tenth of a device to them.
"""

from pat_jax.common.errors import UserError
from pat_jax.models.config import ModelConfig
from pat_jax.planning.memory import GIB, MemoryModel
from pat_jax.planning.types import Split
from pat_jax.profiling.cross_compile.target_build import Order, TargetBuild
from pat_jax.profiling.predict.targets import paper_devices


def by_arithmetic(order: Order) -> TargetBuild:
    return TargetBuild(order, paper_devices(order.target))


def has_equal_layers(model: ModelConfig) -> bool:
    """Returns whether all layers have experts, or none: bytes are then affine in the layers."""
    return not (model.sparse_layers and model.has_mlp)


def nearest(needs: MemoryModel) -> Split:
    """Returns the layout that needs the least memory."""
    return min(needs.weights, key=needs.held)


def check_room(build: TargetBuild, name: str) -> None:
    """Raises UserError if no layout has room for the model: how much memory is lacking."""
    order = build.order
    needs = build.alone
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
