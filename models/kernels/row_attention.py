"""Attention within rows of several sequences, without a cache: what training runs.

Knows arrays alone. Positions say all that is masked. Position 0 begins a sequence. Any other that
is not one above the position before begins a branch of it. A token at position p sees the p tokens
before it: those of its own branch, and those of the sequence's beginning up to where the branch
begins.
"""

from collections.abc import Callable, Mapping
from functools import partial

from jaxtyping import Array, Float, Int

from pat_jax.models.kernels.kernel_choice import ANYWHERE, PALLAS, Kernels
from pat_jax.models.kernels.row_attention_cpu import attend_in_blocks
from pat_jax.models.kernels.row_attention_gpu import attend_on_gpu
from pat_jax.models.kernels.row_attention_tpu import attend_on_tpu

# By the platform of `Kernels`. Each is differentiable, keeps no scores, and computes no block of keys that
# none of a block of queries sees.
KERNELS: Mapping[str, Callable[..., Array]] = {
    "gpu": attend_on_gpu,
    "cuda": attend_on_gpu,
    "tpu": attend_on_tpu,
    "cpu": partial(attend_on_gpu, interpret=True),
}
# Splash attention masks by a function of one number of the query and the key's index, and by segments
# that are equal: a branch, which sees two stretches of its row, is neither (`docs/targets.md`).
WITHOUT_BRANCHES = ("tpu",)


def knows_branches(platform: str) -> bool:
    """Whether rows for these devices, as `jax.Device.platform` has it, may hold branches."""
    return platform not in WITHOUT_BRANCHES


def attend_rows(
    queries: Float[Array, "rows length kv_heads queries_per_kv head_dim"],
    keys: Float[Array, "rows kv_heads length head_dim"],
    values: Float[Array, "rows kv_heads length head_dim"],
    positions: Int[Array, "rows length"],
    *,
    kernels: Kernels = ANYWHERE,
) -> Float[Array, "rows length kv_heads queries_per_kv head_dim"]:
    """Softmax attention of each token over its own sequence up to itself.

    Args:
      positions: of each token in its sequence. They count up by 1; 0 begins the next one, and
        another number than the next a branch, where the platform's kernel `knows_branches`.
      kernels: what it is computed by; plain operations where not given. Compilers cannot split
        kernels: inside `shard_map` alone, or on one device.
    """
    attend = KERNELS[kernels.platform] if kernels.rows == PALLAS else attend_in_blocks
    return attend(queries, keys, values, positions)
