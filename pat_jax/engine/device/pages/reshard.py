"""The weights from one layout of the chain to another.

Going up, each device keeps a part of what it holds and nothing is sent; going down, the parts are
gathered. `jax.device_put` onto the new shardings is the reference that the tests hold this against.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor

import jax
import numpy as np

from pat_jax.models.policy import Params

ALIGNMENT = 64  # bytes; XLA:CPU takes over what lies so in the host's memory, and copies the rest


def chunks(leaves: Sequence[int], leaf_bytes: Sequence[int], max_bytes: int) -> list[list[int]]:
    """`leaves` in runs whose `leaf_bytes` add up to `max_bytes` at most, or of one leaf."""
    runs: list[list[int]] = []
    filled = max_bytes
    for leaf in leaves:
        if filled + leaf_bytes[leaf] > max_bytes:
            runs.append([])
            filled = 0
        runs[-1].append(leaf)
        filled += leaf_bytes[leaf]
    return runs


def reshard(
    params: Params,
    runs: Sequence[Sequence[int]],
    programs: Sequence[Callable[[list[jax.Array]], list[jax.Array]]],
) -> Params:
    """The weights onto the target's shards, one bounded chunk at a time; `params` is consumed.

    Each chunk is sliced, waited for, and its old leaves deleted before the next one starts:
    donation cannot free them (the shards differ in size), so peak memory is the old weights and one
    chunk.
    """
    leaves, tree = jax.tree.flatten(params)
    for run, program in zip(runs, programs, strict=True):
        new = jax.block_until_ready(program([leaves[i] for i in run]))
        for i, leaf in zip(run, new, strict=True):
            leaves[i].delete()
            leaves[i] = leaf
    return jax.tree.unflatten(tree, leaves)


def reshard_on_host(params: Params, shardings: Params, moving: Sequence[int]) -> Params:
    """The leaves `moving` onto `shardings` by copies in the host's memory; `params` is consumed.

    For CPU devices, whose memory that is. One leaf after the other, and devices that are to hold
    the same share one buffer, as with every `jax.device_put` from the host: no program may be
    donated it.
    """
    leaves, tree = jax.tree.flatten(params)
    onto = jax.tree.leaves(shardings)
    with ThreadPoolExecutor(len(leaves[0].devices())) as threads:
        for i in moving:
            new = jax.block_until_ready(jax.device_put(_gathered(leaves[i], threads), onto[i]))
            leaves[i].delete()
            leaves[i] = new
    return jax.tree.unflatten(tree, leaves)


def _gathered(leaf: jax.Array, threads: Executor) -> np.ndarray:
    """All of `leaf`, each part copied by a thread, where XLA:CPU can take it over."""
    raw = np.empty(leaf.nbytes + ALIGNMENT, np.uint8)
    begin = -raw.ctypes.data % ALIGNMENT
    whole = raw[begin : begin + leaf.nbytes].view(leaf.dtype).reshape(leaf.shape)

    def copy(part: jax.Shard) -> None:
        whole[part.index] = np.asarray(part.data)

    # `list` waits, and raises what a thread raised.
    list(threads.map(copy, [part for part in leaf.addressable_shards if part.replica_id == 0]))
    return whole
