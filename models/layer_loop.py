"""Layers that differ in their numbers alone, one after the other or as a loop.

Unrolled, a compiler optimizes each layer by itself; of a loop it meets the body once, however many
there are. Knows trees of arrays. Does not know what a layer is.
"""

from collections.abc import Callable, Iterator, Sequence
from itertools import groupby
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array

Params = Any  # of one layer, a pytree of arrays
Beside = Any  # what a layer returns beside its output, a pytree of arrays
# One layer's parameters and its input -> its output.
Run = Callable[[Params, Array], tuple[Array, Beside]]


def unrolled(run: Run, layers: Sequence[Params], x: Array) -> tuple[Array, list[Beside]]:
    """What the layers make of x, one after the other, and what each returns beside it."""
    beside = []
    for params in layers:
        x, more = run(params, x)
        beside.append(more)
    return x, beside


def scanned(run: Run, layers: Sequence[Params], x: Array) -> tuple[Array, list[Beside]]:
    """The same, neighbours that are alike in one loop (`jax.lax.scan`).

    A loop reads their parameters from a copy, in x's dtype: a layer casts them to it before
    anything else. Its gradients come as such a copy, too.
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
    """Neighbours whose parameters have equal names, shapes and dtypes."""

    def form(params: Params) -> Any:
        leaves, structure = jax.tree.flatten(params)
        return structure, [(x.shape, x.dtype) for x in leaves]

    for _, alike in groupby(layers, key=form):
        yield list(alike)
