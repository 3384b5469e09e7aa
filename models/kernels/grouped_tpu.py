"""Products of rows with the weights of their experts on a TPU: JAX's megablox.

Its kernel takes rows in the order of their experts, and reads the weights of the experts that have
any once for each tile of rows. It leaves what is behind the last expert's rows as it was in memory.
XLA's `ragged_dot` reads as little with an option of the compiler that has to be given wherever a
program is compiled, and multiplies every row with every expert without it.
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental.pallas import tpu
from jax.experimental.pallas.ops.tpu.megablox.gmm import gmm, tgmm
from jaxtyping import Array, Float, Int

ROWS = 128  # of a tile at most: with fewer a large expert is read more often
LEAST = 16  # rows of a register, of bfloat16
LANES = 128  # numbers of a row of a register
OUTPUTS, INPUTS = 512, 2048  # of a part of the weights at most: both of its buffers fit the memory


class ChoicesOnTpu(NamedTuple):
    """The choices of experts in the order of the experts; those computed elsewhere come last."""

    order: Int[Array, " places"]  # row · k + choice; rows · k: a place that fills a tile up
    sizes: Int[Array, " experts"]  # rows of each
    place: Int[Array, "rows k"]  # that each choice has; as many as there are: computed elsewhere
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
        """Whether kernels can be lowered for a weight[experts, out, in] of this kind."""
        if not isinstance(weight, jax.Array | jax.ShapeDtypeStruct):
            return False
        is_float = weight.dtype in (jnp.bfloat16, jnp.float32)
        return is_float and not any(n % min(n, LANES) or n % LEAST for n in weight.shape[1:])

    def spread(self, x: Float[Array, "rows in"]) -> Float[Array, "places in"]:
        return _spread(x, self.order, self.place)

    def product(
        self, x: Float[Array, "places in"], weight: Float[Array, "experts out in"]
    ) -> Float[Array, "places out"]:
        """What each place's expert makes of it. What is computed elsewhere is refuse."""
        return _product(self.interpret, x, weight.astype(x.dtype), self.sizes)

    def collected(self, each: Float[Array, "places out"]) -> Float[Array, "rows k out"]:
        """By rows; zeros of what is computed elsewhere."""
        return _collected(each, self.order, self.place)


def _tile_rows(num_choices: int) -> int:
    return min(-(-num_choices // LEAST) * LEAST, ROWS)


# The gradient of each is the other, with sums over a row's choices: it is gathered, where JAX would add
# it up place by place.
@jax.custom_vjp
def _spread(x: Array, order: Array, place: Array) -> Array:
    return jnp.take(x, order // place.shape[1], axis=0, mode="fill", fill_value=0)


@jax.custom_vjp
def _collected(each: Array, order: Array, place: Array) -> Array:
    return jnp.take(each, place, axis=0, mode="fill", fill_value=0)


def _keep(function: Any, x: Array, order: Array, place: Array) -> tuple[Array, tuple]:
    return function(x, order, place), (order, place)


def _spread_backward(kept: tuple[Array, Array], grads: Array) -> tuple:
    return jnp.sum(_collected(grads, *kept), axis=1), None, None


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
    """Not copied to the vector memory before a product: XLA copies all experts, where they fit."""
    return weight if interpret else tpu.with_memory_space_constraint(weight, tpu.HBM)


def _part(dimension: int, most: int) -> int:
    """The largest number of whole registers that divides it, `most` at most; less than one whole."""
    if dimension < LANES:
        return dimension
    whole = dimension // LANES
    return LANES * max(n for n in range(1, most // LANES + 1) if whole % n == 0)
