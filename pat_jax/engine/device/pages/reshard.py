"""Reshards the weights from one layout of the chain to another.

If TP rises, each device keeps a part of its shards and nothing is sent; if TP falls, the parts are
gathered. Tests compare with the reference, `jax.device_put` onto the new shardings.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor

import jax
import numpy as np

from pat_jax.models.policy import Params

ALIGNMENT = 64  # bytes; XLA:CPU takes over host arrays aligned like this, and copies others


def chunks(leaves: Sequence[int], leaf_bytes: Sequence[int], max_bytes: int) -> list[list[int]]:
    """Splits `leaves`, indices of `leaf_bytes`, into chunks of at most `max_bytes`. A larger leaf
    is a chunk of its own."""
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
    """Returns the weights on the target's shards; `params` is consumed.

    The chunks `runs` are resharded one by one. Old leaves are deleted before the next chunk starts.
    (Donation cannot free them, because the shards differ in size.) So peak memory is the old
    weights and one chunk.
    """
    leaves, tree = jax.tree.flatten(params)
    for run, program in zip(runs, programs, strict=True):
        new = jax.block_until_ready(program([leaves[i] for i in run]))
        for i, leaf in zip(run, new, strict=True):
            leaves[i].delete()
            leaves[i] = leaf
    return jax.tree.unflatten(tree, leaves)


def reshard_on_host(params: Params, shardings: Params, moving: Sequence[int]) -> Params:
    """Reshards the leaves `moving` by copies in the host's memory; `params` is consumed.

    This is for CPU devices, which use the host's memory. Leaves are copied one after the other.
    Devices that hold the same shard share one buffer, as after any `jax.device_put` from the host:
    do not donate it to a program.
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
    """All of `leaf` in an aligned host array; a thread copies each shard."""
    raw = np.empty(leaf.nbytes + ALIGNMENT, np.uint8)
    begin = -raw.ctypes.data % ALIGNMENT
    whole = raw[begin : begin + leaf.nbytes].view(leaf.dtype).reshape(leaf.shape)

    def copy(part: jax.Shard) -> None:
        whole[part.index] = np.asarray(part.data)

    # `list` waits, and raises what a thread raised.
    list(threads.map(copy, [part for part in leaf.addressable_shards if part.replica_id == 0]))
    return whole
