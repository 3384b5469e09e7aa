"""What of a layer its backward pass keeps, by name; what is not kept is computed anew.

Knows functions of arrays. Does not know what a layer is.
"""

from collections.abc import Callable
from typing import Any

import jax
from jax import checkpoint_policies as policies
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array

NONE = "none"  # no rematerialization: all that a backward pass reads is kept
# The output of attention and the sums of exponentials beside it: with both its kernel's backward pass
# needs no forward pass.
ATTENTION = "attention"
# The experts that a router chose: a backward pass that chose anew might choose others.
ROUTER = "router"

# Of a layer, beside its input; each keeps what those before it keep, and more.
POLICIES: dict[str, Callable[..., Any]] = {
    "full": policies.save_only_these_names(ROUTER),
    "attention": policies.save_only_these_names(ATTENTION, ROUTER),
    "dots": policies.save_from_both_policies(
        policies.dots_with_no_batch_dims_saveable,
        policies.save_only_these_names(ATTENTION, ROUTER),
    ),
}


def rematerialized(function: Callable, remat: str) -> Callable:
    """`function`, whose backward pass keeps what `remat` says (Chen et al. 2016,
    https://arxiv.org/abs/1604.06174).

    Args:
      remat: `none` keeps all; `full` the arguments and what a router chose; `attention` what
        `kept_of_attention` names as well; `dots` also every product with a weight, whose operands
        share no batch dimension.
    """
    return function if remat == NONE else jax.checkpoint(function, policy=POLICIES[remat])


def kept_of_attention(out: Array, sums: Array) -> tuple[Array, Array]:
    """The same two, by the name that policies know: for the forward rule of a kernel."""
    return checkpoint_name(out, ATTENTION), checkpoint_name(sums, ATTENTION)


def kept_of_router(experts: Array) -> Array:
    """The same, by the name that policies know."""
    return checkpoint_name(experts, ROUTER)
