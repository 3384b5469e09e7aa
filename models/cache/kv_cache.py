"""The KV cache as the model sees it, and the names of the axes of its arrays.

Its two forms are in `paged_layer.py` and `burst_layer.py`.
"""

from typing import Protocol, Self

from jaxtyping import Array, Float, Int

from pat_jax.models.kernels.kernel_choice import Kernels

KV_AXES = ("pages", "kv_heads", None, None)


class LayerCache(Protocol):
    """What one layer remembers of the tokens before: all that the model asks of any cache."""

    def attend(
        self,
        queries: Float[Array, "rows length kv_heads queries_per_kv head_dim"],
        keys: Float[Array, "rows length kv_heads head_dim"],
        values: Float[Array, "rows length kv_heads head_dim"],
        positions: Int[Array, "rows length"],
        kernels: Kernels,
    ) -> tuple[Float[Array, "rows length kv_heads queries_per_kv head_dim"], Self]:
        """Remembers the keys and values of consecutive tokens, then attends: each query to
        everything in its row up to its own position.
        """
        ...
