"""A weight with a low-rank adapter (LoRA, arXiv 2106.09685)."""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from pat_jax.common.pytree import pytree_dataclass

Axes = tuple[str | None, ...]  # names of an array's dimensions


@pytree_dataclass
class AdaptedWeight:
    """A weight and its adapter. Products use them as weight + b · a, but never compute this matrix.

    In a stack of experts, the first dimension of `weight`, `a` and `b` is the expert. They may also
    be shapes, axis names or shardings in place of arrays."""

    weight: Any  # [*out, *in]; in a rollout's copy, it may be a `QuantizedWeight`
    a: Any  # [rank, *in], or [experts, rank, in]
    b: Any  # [*out, rank], or [experts, out, rank]; already multiplied by the adapter's scale

    @property
    def contracted(self) -> int:
        """Number of trailing dimensions of the weight that a product sums over."""
        return len(self.weight.shape) + 1 - len(self.b.shape)

    @property
    def is_stack(self) -> bool:
        """Whether the weight's first dimension is the expert."""
        return len(self.a.shape) > self.contracted + 1

    def merged(self) -> Float[Array, "..."]:
        """Returns weight + b · a, in float32."""

        def product(b: Array, a: Array) -> Array:
            return jnp.tensordot(b, a, axes=1, precision="highest")

        of_each = jax.vmap(product) if self.is_stack else product
        more = of_each(self.b.astype(jnp.float32), self.a.astype(jnp.float32))
        return self.weight.astype(jnp.float32) + more


def adapter_axes(axes: Axes, contracted: int, *, is_stack: bool) -> tuple[Axes, Axes]:
    """Returns the axis names of a and b, given those of the weight. The rank's axis has the name
    None, since it is never split.

    Args:
      contracted: number of trailing dimensions of the weight that a product sums over.
      is_stack: whether the weight's first dimension is the expert.
    """
    stack = axes[:1] if is_stack else ()
    return (*stack, None, *axes[-contracted:]), (*axes[:-contracted], None)


def is_adapted(node: object) -> bool:
    return isinstance(node, AdaptedWeight)
