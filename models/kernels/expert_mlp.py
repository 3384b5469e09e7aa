"""Computes the MLPs of experts by a platform's kernels, or tile by tile in plain operations.

`Kernels` and the weights' dtypes and shapes decide which. GPU kernels also take quantized weights;
all dimensions, ranks of adapters included, must be multiples of 16. TPU kernels take multiples of
128, and smaller dimensions that are multiples of 16. Does not know how a kernel orders rows.
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pat_jax.models.adapted_weight import AdaptedWeight
from pat_jax.models.kernels.grouped import by_expert
from pat_jax.models.kernels.grouped_gpu import ChoicesOnGpu
from pat_jax.models.kernels.grouped_tpu import ChoicesOnTpu
from pat_jax.models.kernels.kernel_choice import ANYWHERE, PALLAS, Kernels
from pat_jax.models.layers import linear, swiglu

Choices = ChoicesOnGpu | ChoicesOnTpu  # either has `spread`, `product` and `collected`


class ExpertKernels(NamedTuple):
    """One platform's kernels that multiply rows with experts' weights; they are differentiable."""

    of: Callable[..., Choices]  # of (chosen experts, number of experts here, rows per expert)
    takes: Callable[[Any], bool]  # whether the kernels support a weight [experts, out, in]


_ON_GPU = ExpertKernels(ChoicesOnGpu.of, ChoicesOnGpu.takes)
# By the name of the platform in `Kernels`.
KERNELS: Mapping[str, ExpertKernels] = {
    "gpu": _ON_GPU,
    "cuda": _ON_GPU,
    "tpu": ExpertKernels(ChoicesOnTpu.of, ChoicesOnTpu.takes),
    "cpu": ExpertKernels(partial(ChoicesOnGpu.of, interpret=True), ChoicesOnGpu.takes),
}


def takes_weight(kernels: Kernels, weight: Any) -> bool:
    """Whether the platform's kernels can be lowered for this weight or shape."""
    parts = (weight.weight, weight.a, weight.b) if isinstance(weight, AdaptedWeight) else (weight,)
    return all(map(KERNELS[kernels.platform].takes, parts))


def mlp_by_expert(
    experts: tuple[Any, Any, Any],
    x: Float[Array, "rows in"],
    chosen: Int[Array, "rows k"],
    weights: Float[Array, "rows k"],
    size: int,
    kernels: Kernels = ANYWHERE,
) -> Float[Array, "rows out"]:
    """Returns each row's weighted sum of its experts' outputs, for the experts on this device.

    Args:
      experts: weights gate, up and down, each [experts, out, in], of the experts on this device.
      chosen: each row's experts, as indices into `experts`; any other number adds nothing.
      weights: weight of each chosen expert's output.
      size: approximate number of rows per expert.
    """
    if kernels.experts != PALLAS or not all(takes_weight(kernels, each) for each in experts):
        return by_expert(_mlp, experts, x, chosen, weights, size)
    gate, up, down = experts
    choices = KERNELS[kernels.platform].of(chosen, len(jax.tree.leaves(gate)[0]), size)
    rows = choices.spread(x)
    inner = swiglu(_product(choices, rows, gate), _product(choices, rows, up))
    each = choices.collected(_product(choices, inner, down))
    return jnp.einsum("rk,rko->ro", weights.astype(each.dtype), each)


def _product(choices: Choices, x: Array, weight: Any) -> Array:
    if not isinstance(weight, AdaptedWeight):
        return choices.product(x, weight)
    more = choices.product(choices.product(x, weight.a), weight.b)
    return choices.product(x, weight.weight) + more


def _mlp(expert: tuple[Any, Any, Any], x: Float[Array, "size in"]) -> Float[Array, "size out"]:
    gate, up, down = expert
    return linear(swiglu(linear(x, gate), linear(x, up)), down)
