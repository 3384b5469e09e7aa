"""Runs equal layers unrolled or as a loop.

If layers are unrolled, the compiler optimizes each by itself. In a loop it compiles one layer,
however many there are. Knows trees of arrays. Does not know what a layer is.
"""

from collections.abc import Callable, Iterator, Sequence
from itertools import groupby
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array

Params = Any  # the parameters of one layer, a pytree of arrays
Beside = Any  # what a layer returns in addition to its output, a pytree of arrays
# A function (a layer's parameters, its input) -> (its output, what it returns in addition).
Run = Callable[[Params, Array], tuple[Array, Beside]]


def unrolled(run: Run, layers: Sequence[Params], x: Array) -> tuple[Array, list[Beside]]:
    """Applies the layers to x in turn. Returns the last layer's output, and a list of each layer's
    additional results."""
    beside = []
    for params in layers:
        x, more = run(params, x)
        beside.append(more)
    return x, beside


def scanned(run: Run, layers: Sequence[Params], x: Array) -> tuple[Array, list[Beside]]:
    """Like `unrolled`, but neighbouring layers with equal shapes run in one loop (`jax.lax.scan`).

    A loop reads the layers' parameters from a stacked copy in x's dtype; layers would cast them to
    this dtype anyway. The gradients of the backward pass are stacked, too.
    """

    def stack(*of: Array) -> Array:
        is_float = jnp.issubdtype(of[0].dtype, jnp.floating)
        return jnp.stack([each.astype(x.dtype) for each in of] if is_float else of)

    beside = []
    for alike in _alike(layers):
        if len(alike) == 1:
            x, more = run(alike[0], x)
            beside.append(more)
            continue
        x, more = jax.lax.scan(lambda x, params: run(params, x), x, jax.tree.map(stack, *alike))
        beside += [jax.tree.map(lambda each, i=i: each[i], more) for i in range(len(alike))]
    return x, beside


def _alike(layers: Sequence[Params]) -> Iterator[list[Params]]:
    """Groups neighbouring layers whose parameters have equal names, shapes and dtypes."""

    def form(params: Params) -> Any:
        leaves, structure = jax.tree.flatten(params)
        return structure, [(x.shape, x.dtype) for x in leaves]

    for _, alike in groupby(layers, key=form):
        yield list(alike)
