"""A weight with a low-rank product beside it (LoRA, arXiv 2106.09685)."""

import jax.numpy as jnp
from jaxtyping import Array, Float

from pat_jax.common.pytree import pytree_dataclass


@pytree_dataclass
class AdaptedWeight:
    """weight + b · a, which a product with it never multiplies out."""

    weight: Float[Array, "..."]  # [*out, *in]
    a: Float[Array, "..."]  # [rank, *in]
    b: Float[Array, "..."]  # [*out, rank], scale included

    def merged(self) -> Float[Array, "..."]:
        """The sum, in float32."""
        product = jnp.tensordot(
            self.b.astype(jnp.float32), self.a.astype(jnp.float32), axes=1, precision="highest"
        )
        return self.weight.astype(jnp.float32) + product


def is_adapted(node: object) -> bool:
    return isinstance(node, AdaptedWeight)
