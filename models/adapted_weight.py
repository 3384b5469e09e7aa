"""A weight with a low-rank product beside it (LoRA, arXiv 2106.09685)."""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from pat_jax.common.pytree import pytree_dataclass

Axes = tuple[str | None, ...]  # names of an array's dimensions


@pytree_dataclass
class AdaptedWeight:
    """weight + b · a, which a product with it never multiplies out; of experts, which are the first
    dimension of all three, each expert's own. In the place of arrays may be shapes, axis names or
    shardings."""

    weight: Any  # [*out, *in]; a `QuantizedWeight` where it only generates
    a: Any  # [rank, *in], or [experts, rank, in]
    b: Any  # [*out, rank], scale included, or [experts, out, rank]

    @property
    def contracted(self) -> int:
        """Trailing dimensions of the weight that a product sums over."""
        return len(self.weight.shape) + 1 - len(self.b.shape)

    @property
    def is_stack(self) -> bool:
        """Whether it is of experts."""
        return len(self.a.shape) > self.contracted + 1

    def merged(self) -> Float[Array, "..."]:
        """The sum, in float32."""

        def product(b: Array, a: Array) -> Array:
            return jnp.tensordot(b, a, axes=1, precision="highest")

        of_each = jax.vmap(product) if self.is_stack else product
        more = of_each(self.b.astype(jnp.float32), self.a.astype(jnp.float32))
        return self.weight.astype(jnp.float32) + more


def adapter_axes(axes: Axes, contracted: int, *, is_stack: bool) -> tuple[Axes, Axes]:
    """Axes of a and b beside a weight of `axes`: those of its own dimensions; the rank is never
    split.

    Args:
      contracted: trailing dimensions of the weight that a product sums over.
      is_stack: its first dimension is the expert.
    """
    stack = axes[:1] if is_stack else ()
    return (*stack, None, *axes[-contracted:]), (*axes[:-contracted], None)


def is_adapted(node: object) -> bool:
    return isinstance(node, AdaptedWeight)
