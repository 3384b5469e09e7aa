"""Reshards the weights from one layout of the chain to another.

If TP rises, each device keeps a part of its shards and nothing is sent; if TP falls, the parts are
gathered. Tests compare with the reference, `jax.device_put` onto the new shardings.
"""

from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import groupby

import jax
import numpy as np

from pat_jax.layout.layout import shard_bytes
from pat_jax.models.policy import Params

ALIGNMENT = 64  # bytes; XLA:CPU takes over host arrays aligned like this, and copies others


@dataclass(frozen=True)
class Reshard:
    """How the weights are resharded from one layout to another."""

    runs: list[list[int]]  # chunks of the leaves whose sharding differs; other leaves stay
    parts: list[int]  # for each chunk, the first one that is equal: they share a program
    is_on_host: bool  # copied leaf by leaf in the host's memory, without a program
    sent_bytes: int  # sent between devices, summed over all devices
    extra_bytes: int  # the most that one device holds besides its old shards

    @classmethod
    def between(
        cls, source: Params, target: Params, num_devices: int, max_bytes: int, *, is_on_host: bool
    ) -> "Reshard":
        """Returns the resharding of weights with the shapes and shardings of `source`.

        Args:
          max_bytes: the most bytes of a chunk, over all devices.
        """
        paths, before = zip(*jax.tree.leaves_with_path(source), strict=True)
        after = jax.tree.leaves(target)
        pairs = enumerate(zip(before, after, strict=True))
        moving = [i for i, (a, b) in pairs if a.sharding != b.sharding]
        whole = [x.size * x.dtype.itemsize for x in before]
        held, needed = ([shard_bytes(x) for x in leaves] for leaves in (before, after))
        extra = list(needed)
        if is_on_host:
            # Leaf by leaf on the host: the next leaf reuses the memory, whereas a large chunk's
            # would have to be paged in anew (seen: half of the time).
            runs = [[i] for i in moving]
            extra = [n + w // num_devices for n, w in zip(needed, whole, strict=True)]
        else:
            # The first two keys of a path name the layer.
            layers = (list(leaves) for _, leaves in groupby(moving, lambda i: paths[i][:2]))
            runs = chunks(layers, whole, max_bytes)
        first: dict[tuple, int] = {}
        forms = [tuple((before[i], after[i].sharding) for i in run) for run in runs]
        return cls(
            runs,
            [first.setdefault(form, part) for part, form in enumerate(forms)],
            is_on_host,
            sent_bytes=sum(max(needed[i] - held[i], 0) for i in moving) * num_devices,
            extra_bytes=max((sum(extra[i] for i in run) for run in runs), default=0),
        )


def chunks(
    layers: Iterable[Sequence[int]], leaf_bytes: Sequence[int], max_bytes: int
) -> list[list[int]]:
    """Splits leaves, indices of `leaf_bytes`, into chunks of at most `max_bytes`. A larger leaf is
    a chunk of its own.

    Args:
      layers: the leaves of each layer. A layer is in one chunk if it fits, and begins a chunk if it
        does not, so that equal layers are in equal chunks.
    """
    runs: list[list[int]] = []
    filled = max_bytes
    for layer in layers:
        if filled + sum(leaf_bytes[leaf] for leaf in layer) > max_bytes:
            filled = max_bytes
        for leaf in layer:
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
