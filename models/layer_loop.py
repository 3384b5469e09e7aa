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
Run = Callable[[Params, Array], Array]  # one layer's parameters and its input -> its output


def unrolled(run: Run, layers: Sequence[Params], x: Array) -> Array:
    """What the layers make of x, one after the other."""
    for params in layers:
        x = run(params, x)
    return x


def scanned(run: Run, layers: Sequence[Params], x: Array) -> Array:
    """The same, neighbours that are alike in one loop (`jax.lax.scan`).

    A loop reads their parameters from a copy, in x's dtype: a layer casts them to it before
    anything else. Its gradients come as such a copy, too.
    """
    dtype = x.dtype
    for alike in _alike(layers):
        if len(alike) == 1:
            x = run(alike[0], x)
            continue
        stacked = jax.tree.map(lambda *of: jnp.stack([each.astype(dtype) for each in of]), *alike)
        x, _ = jax.lax.scan(lambda x, params: (run(params, x), None), x, stacked)
    return x


def _alike(layers: Sequence[Params]) -> Iterator[list[Params]]:
    """Neighbours whose parameters have equal names, shapes and dtypes."""

    def form(params: Params) -> Any:
        leaves, structure = jax.tree.flatten(params)
        return structure, [(x.shape, x.dtype) for x in leaves]

    for _, alike in groupby(layers, key=form):
        yield list(alike)
