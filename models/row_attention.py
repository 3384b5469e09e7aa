"""Attention within rows of several sequences, without a cache: what training runs.

Knows arrays alone. A position of 0 begins a sequence: the token at position p of its sequence sees
the p tokens before it in the row, and itself. So positions say all that is masked.
"""

from collections.abc import Callable, Mapping

from jaxtyping import Array, Float, Int

from pat_jax.models.row_attention_cpu import attend_in_blocks
from pat_jax.models.row_attention_gpu import attend_on_gpu
from pat_jax.models.row_attention_tpu import attend_on_tpu

# By what `jax.Device.platform` says, and by what lowering calls a GPU of NVIDIA. Each is differentiable,
# keeps no scores, and computes no block of keys that none of a block of queries sees.
KERNELS: Mapping[str, Callable[..., Array]] = {
    "gpu": attend_on_gpu,
    "cuda": attend_on_gpu,
    "tpu": attend_on_tpu,
}


def attend_rows(
    queries: Float[Array, "rows length kv_heads queries_per_kv head_dim"],
    keys: Float[Array, "rows kv_heads length head_dim"],
    values: Float[Array, "rows kv_heads length head_dim"],
    positions: Int[Array, "rows length"],
    *,
    platform: str | None = None,
) -> Float[Array, "rows length kv_heads queries_per_kv head_dim"]:
    """Softmax attention of each token over its own sequence up to itself.

    Args:
      positions: of each token in its sequence. They count up by 1; 0 begins the next one.
      platform: whose kernel; on a platform without one, and where it is not given, what runs anywhere.
        Compilers cannot split kernels: inside `shard_map` alone, or on one device.
    """
    attend = KERNELS.get(platform or "", attend_in_blocks)
    return attend(queries, keys, values, positions)
