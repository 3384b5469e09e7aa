"""Attention within packed rows of several sequences, without a cache: what training runs.

The positions alone determine the mask. Position 0 begins a sequence. A position that is neither 0
nor the one before plus 1 begins a branch of the sequence. A token at position p sees itself and p
tokens before it: those of its own branch, and the beginning of the sequence up to the branch.
"""

from collections.abc import Callable, Mapping
from functools import partial

from jaxtyping import Array, Float, Int

from pat_jax.models.kernels.kernel_choice import ANYWHERE, PALLAS, Kernels
from pat_jax.models.kernels.row_attention_cpu import attend_in_blocks
from pat_jax.models.kernels.row_attention_gpu import attend_on_gpu
from pat_jax.models.kernels.row_attention_tpu import attend_on_tpu

# Attention by the name of the platform in `Kernels`. Each function is differentiable, stores no
# scores, and skips blocks of keys that no query of a block sees.
KERNELS: Mapping[str, Callable[..., Array]] = {
    "gpu": attend_on_gpu,
    "cuda": attend_on_gpu,
    "tpu": attend_on_tpu,
    "cpu": partial(attend_on_gpu, interpret=True),
}
# Splash attention masks by a function of one number of the query and the key's index, and by equal
# segments. Neither can express a branch, which sees two stretches of its row (`benchmarks/reports/targets.md`).
WITHOUT_BRANCHES = ("tpu",)


def knows_branches(platform: str) -> bool:
    """Whether rows may hold branches on devices of this `jax.Device.platform`."""
    return platform not in WITHOUT_BRANCHES


def attend_rows(
    queries: Float[Array, "rows length kv_heads queries_per_kv head_dim"],
    keys: Float[Array, "rows kv_heads length head_dim"],
    values: Float[Array, "rows kv_heads length head_dim"],
    positions: Int[Array, "rows length"],
    *,
    kernels: Kernels = ANYWHERE,
) -> Float[Array, "rows length kv_heads queries_per_kv head_dim"]:
    """Returns softmax attention of each token over its own sequence up to itself.

    Args:
      positions: each token's position in its sequence, counting up by 1. 0 begins the next
        sequence. Any other jump begins a branch, where the platform `knows_branches`.
      kernels: which kernels compute it; plain operations if not given. Compilers cannot split
        kernels, so these run only inside `shard_map` or on one device.
    """
    attend = KERNELS[kernels.platform] if kernels.rows == PALLAS else attend_in_blocks
    return attend(queries, keys, values, positions)
