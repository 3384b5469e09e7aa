"""Multiplies rows with the weights of their experts on a TPU, by JAX's megablox kernels.

The kernels take rows in the order of their experts. For each tile of rows they read only the
weights of experts that have rows in it. Results behind the last expert's rows are undefined. XLA's
`ragged_dot` reads as little only with a compiler option, which every compilation would need;
without it, it multiplies every row with every expert.
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental.pallas import tpu
from jax.experimental.pallas.ops.tpu.megablox.gmm import gmm, tgmm
from jaxtyping import Array, Float, Int

ROWS = 128  # most rows of a tile: with fewer, a large expert's weights are read more often
LEAST = 16  # rows of a bfloat16 register
LANES = 128  # values in a row of a register
OUTPUTS, INPUTS = 512, 2048  # most in a part of the weights: vector memory holds two such parts


class ChoicesOnTpu(NamedTuple):
    """The choices (a row with one of its k experts each), ordered by expert. Those of experts on
    other devices come last."""

    order: Int[Array, " places"]  # row · k + index among the row's experts; rows · k: padding
    sizes: Int[Array, " experts"]  # number of rows of each expert
    place: Int[Array, "rows k"]  # index of each choice in `order`; len(order): on other devices
    interpret: bool

    @classmethod
    def of(
        cls, chosen: Int[Array, "rows k"], num_experts: int, size: int, *, interpret: bool = False
    ) -> "ChoicesOnTpu":
        del size  # tiles may have rows of several experts
        is_here = (chosen >= 0) & (chosen < num_experts)
        expert = jnp.where(is_here, chosen, num_experts).reshape(-1)
        order = jnp.argsort(expert, stable=True).astype(jnp.int32)
        sizes = jnp.bincount(expert, length=num_experts).astype(jnp.int32)
        tile = _tile_rows(chosen.size)
        padded = jnp.pad(order, (0, -chosen.size % tile), constant_values=chosen.size)
        place = jnp.zeros_like(order).at[order].set(jnp.arange(chosen.size, dtype=jnp.int32))
        place = jnp.where(is_here, place.reshape(chosen.shape), len(padded))
        return cls(padded, sizes, place, interpret)

    @staticmethod
    def takes(weight: Any) -> bool:
        """Whether the kernels can be lowered for this weight [experts, out, in]."""
        if not isinstance(weight, jax.Array | jax.ShapeDtypeStruct):
            return False
        is_float = weight.dtype in (jnp.bfloat16, jnp.float32)
        return is_float and not any(n % min(n, LANES) or n % LEAST for n in weight.shape[1:])

    def spread(self, x: Float[Array, "rows in"]) -> Float[Array, "places in"]:
        """Returns the rows of x in the order of their experts, in which `product` takes them."""
        return _spread(x, self.order, self.place)

    def product(
        self, x: Float[Array, "places in"], weight: Float[Array, "experts out in"]
    ) -> Float[Array, "places out"]:
        """Returns each row times its expert's weights; undefined for experts on other devices."""
        return _product(self.interpret, x, weight.astype(x.dtype), self.sizes)

    def collected(self, each: Float[Array, "places out"]) -> Float[Array, "rows k out"]:
        """Returns results of `product` in the order of rows; 0 for experts on other devices."""
        return _collected(each, self.order, self.place)


def _tile_rows(num_choices: int) -> int:
    return min(-(-num_choices // LEAST) * LEAST, ROWS)


# The gradient of each of these two functions is the other, with sums over a row's choices. So it is
# a gather, where JAX would scatter-add.
@jax.custom_vjp
def _spread(x: Array, order: Array, place: Array) -> Array:
    return jnp.take(x, order // place.shape[1], axis=0, mode="fill", fill_value=0)


@jax.custom_vjp
def _collected(each: Array, order: Array, place: Array) -> Array:
    return jnp.take(each, place, axis=0, mode="fill", fill_value=0)


def _keep(function: Any, x: Array, order: Array, place: Array) -> tuple[Array, tuple]:
    return function(x, order, place), (order, place)


def _spread_backward(kept: tuple[Array, Array], grads: Array) -> tuple:
    order, place = kept
    return jnp.sum(_collected(grads, order, place), axis=1), None, None


def _collected_backward(kept: tuple[Array, Array], grads: Array) -> tuple:
    by_choice = grads.reshape(-1, grads.shape[-1])
    return jnp.take(by_choice, kept[0], axis=0, mode="fill", fill_value=0), None, None


_spread.defvjp(partial(_keep, _spread), _spread_backward)
_collected.defvjp(partial(_keep, _collected), _collected_backward)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _product(interpret: bool, x: Array, weight: Array, sizes: Array) -> Array:
    _, outputs, inputs = weight.shape
    tiles = _tile_rows(len(x)), _part(inputs, INPUTS), _part(outputs, OUTPUTS)
    weight = _where_it_is(weight, interpret)
    return gmm(x, weight, sizes, x.dtype, tiles, transpose_rhs=True, interpret=interpret)


def _forward(interpret: bool, x: Array, weight: Array, sizes: Array) -> tuple[Array, tuple]:
    return _product(interpret, x, weight, sizes), (x, weight, sizes)


def _backward(interpret: bool, kept: tuple[Array, Array, Array], grads: Array) -> tuple:
    x, weight, sizes = kept
    _, outputs, inputs = weight.shape
    rows = _tile_rows(len(x))
    tiles = rows, _part(outputs, INPUTS), _part(inputs, OUTPUTS)
    stack = _where_it_is(weight, interpret)
    to_x = gmm(grads, stack, sizes, x.dtype, tiles, interpret=interpret)
    tiles = rows, _part(outputs, OUTPUTS), _part(inputs, OUTPUTS)
    to_weight = tgmm(grads.T, x, sizes, weight.dtype, tiles, interpret=interpret)
    return to_x, to_weight, None


_product.defvjp(_forward, _backward)


def _where_it_is(weight: Array, interpret: bool) -> Array:
    """Keeps the weight in HBM: XLA would copy all experts to vector memory if they fit there."""
    return weight if interpret else tpu.with_memory_space_constraint(weight, tpu.HBM)


def _part(dimension: int, most: int) -> int:
    """Returns the largest multiple of LANES up to `most` that divides the dimension, or the whole
    dimension if it is below LANES."""
    if dimension < LANES:
        return dimension
    whole = dimension // LANES
    return LANES * max(n for n in range(1, most // LANES + 1) if whole % n == 0)
