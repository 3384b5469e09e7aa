"""The arrays that a drafter keeps on the devices during training: a draft model, or a trained head.

Knows shapes and shardings. Does not know how a head learns (`exit_head.py`).
"""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import optax

from pat_jax.common.pytree import with_sharding
from pat_jax.engine.device.draft.draft_model import whole_params
from pat_jax.engine.device.draft.drafter import Drafter
from pat_jax.layout.layout import Layout
from pat_jax.rl.algorithm.update import TrainState

LEARNING_RATE = 2e-3  # Adam's after the warm-up; the head's initial values are zeros
WARM_UP = 5


@dataclass(frozen=True)
class DrafterState:
    """Shapes with shardings of a drafter's arrays. Every device has a whole copy of each."""

    always: Any = ()  # arrays that the trainer keeps during updates and rollouts
    in_updates: Any = ()  # arrays that updates count here; rollouts count them as their own


def drafter_state(
    drafter: Drafter, layout: Layout, embed_dim: int, dtype: jnp.dtype, *, learns: bool
) -> DrafterState:
    """Returns shapes and shardings of the arrays that the drafter keeps on the training devices.

    Args:
      embed_dim: width of the policy's residual stream.
      dtype: dtype of the rollouts' weights.
      learns: whether the early-exit head is trained.
    """
    head = head_state(layout, embed_dim) if learns and drafter.drafts.exit_layer else ()
    draft_model = drafter.policy and whole_params(drafter.policy, layout, dtype)
    return DrafterState(head, draft_model or ())


def head_optimizer() -> optax.GradientTransformation:
    return optax.adam(optax.schedules.linear_schedule(0.0, LEARNING_RATE, WARM_UP))


def head_state(layout: Layout, embed_dim: int) -> TrainState:
    """Returns shapes with shardings of an early-exit head with its optimizer's moments."""
    head = jax.ShapeDtypeStruct((embed_dim, embed_dim), jnp.float32)
    init = head_optimizer().init
    step = jnp.zeros((), jnp.int32)
    shapes = jax.eval_shape(lambda head: TrainState(head, init(head), step), head)
    return with_sharding(shapes, layout.sharding())
