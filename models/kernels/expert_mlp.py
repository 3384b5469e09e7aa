"""The MLPs of experts: by kernels of a platform, or tile by tile in plain operations.

`Kernels` chooses the way, and so does the kind of the weights. A GPU's kernel takes quantized
weights as well, and dimensions that are multiples of 16, the rank of adapters among them. A TPU's
takes multiples of 128, and smaller ones that are multiples of 16. Does not know where a kernel
finds a choice.
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pat_jax.models.adapted_weight import AdaptedWeight
from pat_jax.models.kernels.grouped import by_expert
from pat_jax.models.kernels.grouped_gpu import ChoicesOnGpu
from pat_jax.models.kernels.grouped_tpu import ChoicesOnTpu
from pat_jax.models.kernels.kernel_choice import ANYWHERE, PALLAS, Kernels
from pat_jax.models.layers import linear, swiglu


class Choices(Protocol):
    """The choices of experts as a platform's kernels take them."""

    def spread(self, x: Float[Array, "rows in"]) -> Array:
        """Rows as `product` takes them."""
        ...

    def product(self, x: Array, weight: Any) -> Array:
        """What each choice's expert, of weight[experts, out, in], makes of it."""
        ...

    def collected(self, each: Array) -> Float[Array, "rows k out"]:
        """Results of products by rows; zeros of what is computed elsewhere."""
        ...


class ExpertKernels(NamedTuple):
    """The products by expert of one platform; they are differentiable."""

    of: Callable[..., Choices]  # chosen experts, how many are here, rows that one has
    takes: Callable[[Any], bool]  # a weight[experts, out, in]


_ON_GPU = ExpertKernels(ChoicesOnGpu.of, ChoicesOnGpu.takes)
# By the platform of `Kernels`.
KERNELS: Mapping[str, ExpertKernels] = {
    "gpu": _ON_GPU,
    "cuda": _ON_GPU,
    "tpu": ExpertKernels(ChoicesOnTpu.of, ChoicesOnTpu.takes),
    "cpu": ExpertKernels(partial(ChoicesOnGpu.of, interpret=True), ChoicesOnGpu.takes),
}


def takes_weight(kernels: Kernels, weight: Any) -> bool:
    """Whether the platform's kernels can be lowered for a weight, or a shape, of this kind."""
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
    """The weighted sum of what each row's experts make of it, of those whose weights are here.

    Args:
      experts: the weights [experts, out, in] of the gates, of what they gate, and of the way back.
      chosen: by their number here; any other number adds nothing.
      size: rows that an expert has, about.
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
