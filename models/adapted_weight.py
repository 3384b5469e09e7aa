"""A weight with a low-rank product beside it (LoRA, arXiv 2106.09685)."""

from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float

from pat_jax.common.pytree import pytree_dataclass

Axes = tuple[str | None, ...]  # names of an array's dimensions


@pytree_dataclass
class AdaptedWeight:
    """weight + b · a, which a product with it never multiplies out. In the place of arrays may be
    shapes, axis names or shardings."""

    weight: Any  # [*out, *in]; a `QuantizedWeight` where it only generates
    a: Any  # [rank, *in]
    b: Any  # [*out, rank], scale included

    def merged(self) -> Float[Array, "..."]:
        """The sum, in float32."""
        product = jnp.tensordot(
            self.b.astype(jnp.float32), self.a.astype(jnp.float32), axes=1, precision="highest"
        )
        return self.weight.astype(jnp.float32) + product


def adapter_axes(axes: Axes, contracted: int) -> tuple[Axes, Axes]:
    """Axes of a and b beside a weight of `axes`: those of its own dimensions; the rank is never
    split.

    Args:
      contracted: trailing dimensions of the weight that a product sums over.
    """
    return (None, *axes[-contracted:]), (*axes[:-contracted], None)


def is_adapted(node: object) -> bool:
    return isinstance(node, AdaptedWeight)
