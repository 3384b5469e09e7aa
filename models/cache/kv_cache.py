"""The interface of the KV cache that the model uses, and the axis names of its arrays.

`paged_layer.py`, `burst_layer.py` and `draft_layer.py` implement it.
"""

from typing import Protocol, Self

from jaxtyping import Array, Float, Int

from pat_jax.models.kernels.kernel_choice import Kernels

KV_AXES = ("pages", "kv_heads", None, None)


class LayerCache(Protocol):
    """The keys and values of one layer. The model calls only `attend`."""

    def attend(
        self,
        queries: Float[Array, "rows length kv_heads queries_per_kv head_dim"],
        keys: Float[Array, "rows length kv_heads head_dim"],
        values: Float[Array, "rows length kv_heads head_dim"],
        positions: Int[Array, "rows length"],
        kernels: Kernels,
    ) -> tuple[Float[Array, "rows length kv_heads queries_per_kv head_dim"], Self]:
        """Stores the keys and values of consecutive tokens, then computes attention.

        Each query sees all keys in its row up to its own position.
        """
        ...
