"""Rematerialization: which values of a layer are kept for the backward pass, by name.

Knows functions of arrays. Does not know what a layer is.
"""

from collections.abc import Callable
from typing import Any

import jax
from jax import checkpoint_policies as policies
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array

NONE = "none"  # no rematerialization: every value that a backward pass reads is kept
# The name of attention's output and of its sums of exponentials. If both are kept, the kernel's
# backward pass needs no forward pass.
ATTENTION = "attention"
# The name of the experts that a router chose. They are kept: a recomputed choice might differ.
ROUTER = "router"

# What is kept of a layer in addition to its input; each policy keeps more than the one before.
POLICIES: dict[str, Callable[..., Any]] = {
    "full": policies.save_only_these_names(ROUTER),
    "attention": policies.save_only_these_names(ATTENTION, ROUTER),
    "dots": policies.save_from_both_policies(
        policies.dots_with_no_batch_dims_saveable,
        policies.save_only_these_names(ATTENTION, ROUTER),
    ),
}


def rematerialized(function: Callable, remat: str) -> Callable:
    """Returns `function` with a backward pass that keeps what `remat` says and recomputes the rest.

    Args:
      remat: `none` keeps all values; `full` keeps the arguments and a router's choice; `attention`
        also keeps attention's output and sums; `dots` also keeps every product with a weight (one
        whose operands share no batch dimension).

    Reference: Chen et al. 2016, https://arxiv.org/abs/1604.06174.
    """
    return function if remat == NONE else jax.checkpoint(function, policy=POLICIES[remat])


def kept_of_attention(out: Array, sums: Array) -> tuple[Array, Array]:
    """Returns both arrays with the name `ATTENTION`; a kernel's forward rule calls this."""
    return checkpoint_name(out, ATTENTION), checkpoint_name(sums, ATTENTION)
