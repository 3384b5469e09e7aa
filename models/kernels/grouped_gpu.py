"""Multiplies rows with the weights of their experts on a GPU, forward and backward.

A program multiplies a tile of rows of one expert with a part of that expert's weights. It reads the
rows in place and writes each result to the place of its choice: nothing is copied into the order of
the experts, and empty slots of a tile take no memory. Programs of unused tiles end at once. Triton
needs powers of two: a part is the largest one that divides the dimension, up to a limit.
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton
from jaxtyping import Array, Float, Int

from pat_jax.models.kernels.grouped import Tiles, in_tiles
from pat_jax.models.weight_formats import QuantizedWeight

LEAST = 16  # least size of each dimension of a product on tensor cores
STAGES = 3  # number of pipeline stages: a loop's parts that are loaded at once
GRADIENT = 128  # most inputs, and most outputs, of a program that computes a weight's gradient


class Part(NamedTuple):
    """The most outputs and inputs of an expert's weights that one program multiplies."""

    outputs: int
    inputs: int  # in each turn of the loop
    warps: int


# By the number of rows of a tile. With few rows, loading weights takes longest: then more programs
# and longer parts are faster.
PARTS = {16: Part(64, 128, 4), 64: Part(128, 64, 4), 128: Part(128, 64, 8)}


class ChoicesOnGpu(NamedTuple):
    """The choices (a row with one of its k experts each), as tiles for the GPU's kernels."""

    tiles: Tiles
    interpret: bool

    @classmethod
    def of(
        cls, chosen: Int[Array, "rows k"], num_experts: int, size: int, *, interpret: bool = False
    ) -> "ChoicesOnGpu":
        """Returns the choices grouped into tiles.

        Args:
          size: approximate number of rows per expert.
        """
        rows = max(n for n in PARTS if n <= max(size, LEAST))
        return cls(in_tiles(chosen, num_experts, rows), interpret)

    @staticmethod
    def takes(weight: Any) -> bool:
        """Whether the kernels can be lowered for this weight [experts, out, in]."""
        values = weight.values if isinstance(weight, QuantizedWeight) else weight
        return isinstance(values, jax.Array | jax.ShapeDtypeStruct) and not any(
            n % LEAST for n in values.shape[1:]
        )

    def spread(self, x: Float[Array, "rows in"]) -> Float[Array, "rows in"]:
        """Returns x: the kernels read rows in place."""
        return x

    def product(
        self, x: Float[Array, "rows_or_choices in"], weight: Array | QuantizedWeight
    ) -> Float[Array, "choices out"]:
        """Returns each choice's row times its expert's part of `weight` [experts, out, in].

        Results for experts on other devices are undefined.
        """
        if isinstance(weight, QuantizedWeight):
            return _multiplied(x, weight.values, self.tiles, self.interpret, scale=weight.scale)
        return _product(self.interpret, x, weight, self.tiles)

    def collected(self, each: Float[Array, "choices out"]) -> Float[Array, "rows k out"]:
        """Returns results of `product` in the order of rows; 0 for experts on other devices."""
        return _or_zeros(each, self.tiles).reshape(*self.tiles.slot.shape, -1)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _product(interpret: bool, x: Array, weight: Array, tiles: Tiles) -> Array:
    return _multiplied(x, weight, tiles, interpret)


def _forward(interpret: bool, x: Array, weight: Array, tiles: Tiles) -> tuple[Array, tuple]:
    return _product(interpret, x, weight, tiles), (x, weight, tiles)


def _backward(interpret: bool, kept: tuple[Array, Array, Tiles], grads: Array) -> tuple:
    x, weight, tiles = kept
    each = _multiplied(grads, weight, tiles, interpret, is_turned=True)
    to_x = jnp.sum(_or_zeros(each, tiles).reshape(len(x), -1, x.shape[1]), axis=1)
    return to_x, _to_weight(x, grads, weight, tiles, interpret), None


_product.defvjp(_forward, _backward)


def _or_zeros(each: Float[Array, "choices out"], tiles: Tiles) -> Float[Array, "choices out"]:
    is_here = tiles.slot.reshape(-1, 1) < tiles.choice.size
    return jnp.where(is_here, each, 0)


def _multiplied(
    x: Float[Array, "rows_or_choices in"],
    weight: Float[Array, "experts out in"],
    tiles: Tiles,
    interpret: bool,
    *,
    scale: Float[Array, "experts out"] | None = None,
    is_turned: bool = False,
) -> Float[Array, "choices out"]:
    """Runs the kernel that multiplies each choice's row with its expert's weights.

    Args:
      scale: scale of each output, for quantized weights.
      is_turned: whether the weight is [experts, in, out].
    """
    num_tiles, size = tiles.choice.shape
    inputs, outputs = weight.shape[1:] if is_turned else weight.shape[:0:-1]
    most = PARTS[size]
    part = Part(_part(outputs, most.outputs), _part(inputs, most.inputs), most.warps)
    scales = () if scale is None else (scale,)
    out = jax.ShapeDtypeStruct((tiles.slot.size, outputs), x.dtype)
    of_tile = pl.BlockSpec((None, size), lambda _, tile: (tile, 0))
    number = pl.BlockSpec((1,), lambda _, tile: (tile,))
    count = pl.BlockSpec((1,), lambda *_: (0,))
    return pl.pallas_call(
        partial(_product_kernel, part=part, per_row=tiles.slot.size // len(x), turned=is_turned),
        # Neighbouring programs have tiles of one expert, and so read the same weights.
        grid=(outputs // part.outputs, num_tiles),
        in_specs=[of_tile, number, count, *map(_whole, (x, weight, *scales))],
        out_specs=_whole(out),
        out_shape=out,
        name="by_expert",
        **_options(part.warps, interpret),
    )(tiles.choice, tiles.expert, tiles.count[None], x, weight, *scales)


def _product_kernel(
    choice_ref, expert_ref, count_ref, x_ref, weight_ref, *refs: Any,
    part: Part, per_row: int, turned: bool,
):  # fmt: skip
    *scale_ref, out_ref = refs
    outputs = pl.ds(pl.program_id(0) * part.outputs, part.outputs)

    def multiply():
        choice = choice_ref[...][:, None]
        expert = expert_ref[0]

        def over_inputs(turn, sums):
            inputs = pl.ds(turn * part.inputs, part.inputs)
            x = _rows(x_ref, choice, out_ref.shape[0], inputs, per_row)
            if turned:
                weight = weight_ref[expert, inputs, outputs]
            else:
                weight = weight_ref[expert, outputs, inputs].T
            return sums + triton.dot(x, weight.astype(x.dtype))

        begun = jnp.zeros((choice.shape[0], part.outputs))
        sums = jax.lax.fori_loop(0, x_ref.shape[1] // part.inputs, over_inputs, begun)
        for ref in scale_ref:
            sums *= ref[expert, outputs][None]
        at = out_ref.at[choice, _columns(outputs)]
        triton.store(at, sums.astype(out_ref.dtype), mask=choice < out_ref.shape[0])

    pl.when(pl.program_id(1) < count_ref[0])(multiply)


def _to_weight(
    x: Float[Array, "rows_or_choices in"],
    grads: Float[Array, "choices out"],
    weight: Float[Array, "experts out in"],
    tiles: Tiles,
    interpret: bool,
) -> Float[Array, "experts out in"]:
    num_experts, *sides = weight.shape
    outputs, inputs = (_part(side, GRADIENT) for side in sides)
    is_used = jnp.arange(len(tiles.expert)) < tiles.count
    expert = jnp.where(is_used, tiles.expert, num_experts)[None]
    experts = jnp.arange(num_experts)[:, None]
    first = jnp.sum(expert < experts, axis=1)
    end = jnp.sum(expert <= experts, axis=1)
    number = pl.BlockSpec((1,), lambda _i, _o, expert: (expert,))
    return pl.pallas_call(
        partial(_to_weight_kernel, per_row=len(grads) // len(x)),
        grid=(sides[1] // inputs, sides[0] // outputs, num_experts),
        in_specs=[number, number, *map(_whole, (tiles.choice, x, grads))],
        out_specs=pl.BlockSpec((None, outputs, inputs), lambda i, o, expert: (expert, o, i)),
        out_shape=jax.ShapeDtypeStruct(weight.shape, weight.dtype),
        name="by_expert_to_weight",
        **_options(8, interpret),
    )(first, end, tiles.choice, x, grads)


def _to_weight_kernel(first_ref, end_ref, choice_ref, x_ref, grads_ref, out_ref, *, per_row: int):
    i, o = pl.program_id(0), pl.program_id(1)
    outputs, inputs = out_ref.shape
    outputs, inputs = pl.ds(o * outputs, outputs), pl.ds(i * inputs, inputs)

    def over_tiles(tile, sums):
        choice = choice_ref[tile, :][:, None]
        x = _rows(x_ref, choice, grads_ref.shape[0], inputs, per_row)
        return sums + triton.dot(_rows(grads_ref, choice, grads_ref.shape[0], outputs).T, x)

    begun = jnp.zeros(out_ref.shape)
    sums = jax.lax.fori_loop(first_ref[0], end_ref[0], over_tiles, begun)
    out_ref[...] = sums.astype(out_ref.dtype)


def _rows(ref: Any, choice: Array, num_choices: int, columns: Any, per_row: int = 1) -> Array:
    """Returns the rows of a tile's choices, loaded; `per_row` choices share a row. 0 if empty."""
    at = ref.at[choice // per_row, _columns(columns)]
    return triton.load(at, mask=choice < num_choices, other=0)


def _columns(columns: Any) -> Int[Array, "1 columns"]:
    """Column numbers as an array: interpreted Pallas does not mix row numbers with slices."""
    return (columns.start + jnp.arange(columns.size))[None]


def _part(dimension: int, most: int) -> int:
    """Returns the largest power of two up to `most`, a power of two, that divides the dimension."""
    return min(dimension & -dimension, most)


def _whole(x: Any) -> pl.BlockSpec:
    return pl.BlockSpec(x.shape, lambda *_: (0,) * len(x.shape))


def _options(warps: int, interpret: bool) -> dict[str, Any]:
    params = triton.CompilerParams(num_warps=warps, num_stages=STAGES)
    return {"compiler_params": params, "interpret": interpret}
