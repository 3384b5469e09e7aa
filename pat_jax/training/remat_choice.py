"""Chooses what the backward pass keeps (`--remat auto`): as much as a device's memory has room for.

Knows trainers, and which values their forward passes keep. Does not know what layers compute.
"""

from dataclasses import replace

import jax
import jax.numpy as jnp
from jax.extend.core import Var
from jaxtyping import Array

from pat_jax.config.compute import REMAT_FORMS, Remat
from pat_jax.engine.sizing.memory import shard_bytes
from pat_jax.planning.memory import USABLE, gib
from pat_jax.rl.algorithm.optimizer import in_float32
from pat_jax.training.role_model import RoleModel
from pat_jax.training.roles import Roles
from pat_jax.training.trainable_params import Leaves
from pat_jax.training.trainer import Trainer
from pat_jax.training.update_memory import resident_bytes

LOGIT_COPIES = 2  # float32 logits and their gradients, in the backward pass of a chunk of tokens


def settled_remat(asked: Remat, roles: Roles, limit: float) -> tuple[Remat, str]:
    """Returns the form that is asked for, or, for `auto`, the one that recomputes least among those
    that fit; if none fits, the one that keeps least. Also returns a line for the user if values are
    recomputed that was not asked for, else "".

    Args:
      roles: built from models whose form may be `auto`; their programs are not compiled.
      limit: bytes of a device.
    """
    if asked != "auto":
        return asked, ""
    if not roles.policy.largest:
        return "none", ""
    needed = dict[Remat, int]()
    for form in REMAT_FORMS:
        needed[form] = max(update_bytes(roles, trainer, form) for trainer in roles.trained)
        if needed[form] <= USABLE * limit:
            break
    if len(needed) == 1:
        return form, ""
    more, chosen = [*needed.items()][-2:]
    return form, (
        f"--remat auto is {form}: with it an update takes about {gib(chosen[1])} of a device's "
        f"{gib(limit)}; {more[0]}, which recomputes less, would take {gib(more[1])}"
    )


def update_bytes(roles: Roles, trainer: Trainer, form: Remat) -> int:
    """Returns the bytes of a device that are taken by gradients of the largest micro-batch."""
    model = roles.models[trainer.title]
    whole = kept_bytes(model, trainer, "none")
    kept = whole if form == "none" else kept_bytes(model, trainer, form)
    # A layer's backward pass has all of the layer's values, whatever was kept of them.
    of_a_layer = whole // model.policy.config.num_layers
    gradients = shard_bytes(trainer.trained.abstract_gradients)
    return (
        resident_bytes(trainer)
        + 2 * gradients
        + kept
        + of_a_layer
        + LOGIT_COPIES * _logit_bytes(model, trainer)
    )


def _logit_bytes(model: RoleModel, trainer: Trainer) -> int:
    """Returns the bytes of a device for the float32 logits of a chunk of tokens."""
    ((rows, length),) = trainer.largest
    split = model.layout.split
    tokens = min(rows * length // split.dp, model.predictor.logit_tokens)
    return 4 * tokens * model.policy.config.padded_head_outputs // split.tp


def kept_bytes(model: RoleModel, trainer: Trainer, form: Remat) -> int:
    """Returns the bytes of a device that the forward pass of the largest micro-batch keeps for the
    backward pass, in addition to the parameters. It is an upper bound: XLA may keep less than
    JAX asks it to, and TP divides some of the values."""
    role = model.role
    compute = replace(role.compute, remat=form)
    predictor = replace(model, role=replace(role, compute=compute)).predictor
    trained = trainer.trained

    def kept(frozen: Leaves, params: Leaves, tokens: Array) -> list[Array]:
        forward = trained.over(frozen, predictor).model.forward

        def hidden(params: Leaves) -> Array:
            return forward(params, tokens, tokens, None)[0]

        _, backward = jax.vjp(hidden, in_float32(params))
        return [x for x in jax.tree.leaves(backward) if isinstance(x, jax.Array)]

    (rows_and_length,) = trainer.largest
    tokens = jax.ShapeDtypeStruct(rows_and_length, jnp.int32)
    traced, shapes = jax.make_jaxpr(kept, return_shape=True)(
        trained.abstract_frozen, trained.abstract, tokens
    )
    values = zip(traced.jaxpr.outvars, shapes, strict=True)
    given = {*traced.jaxpr.invars}
    sizes = {
        value: shape.size * shape.dtype.itemsize
        for value, shape in values
        if isinstance(value, Var) and value not in given
    }
    return sum(sizes.values()) // model.layout.split.dp
