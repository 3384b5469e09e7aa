"""The weights from one layout of the chain to another.

Going up, each device keeps a part of what it holds and nothing is sent; going down, the parts are
gathered. `jax.device_put` onto the new shardings is the reference that the tests hold this against.
"""

from collections.abc import Callable, Sequence

import jax

from pat_jax.models.policy import Params


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


def reslice(
    params: Params,
    runs: Sequence[Sequence[int]],
    programs: Sequence[Callable[[list[jax.Array]], list[jax.Array]]],
) -> Params:
    """The weights onto the target's shards, one bounded chunk after the other; `params` is consumed.

    Each chunk is sliced, waited for, and its old leaves deleted before the next one starts: donation
    cannot free them (the shards differ in size), so peak memory is the old weights and one chunk.
    """
    leaves, tree = jax.tree.flatten(params)
    for run, program in zip(runs, programs, strict=True):
        new = jax.block_until_ready(program([leaves[i] for i in run]))
        for i, leaf in zip(run, new, strict=True):
            leaves[i].delete()
            leaves[i] = leaf
    return jax.tree.unflatten(tree, leaves)
