"""The switch: what moves between two layouts of the chain, and how.

Weights are re-sliced: going up, each device keeps a part of what it holds and nothing is sent; going
down, the parts are gathered. The KV cache is migrated: going up, each group of devices that merges
exchanges heads for rows in one all-to-all (and gathers rows where KV heads are replicated); going
down is the same in reverse. `jax.device_put` onto the new shardings is the reference that the tests
hold both against.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import jax
import numpy as np
from jaxtyping import Array

from pat_jax.engine.layout import Axes, Layout
from pat_jax.models.kv_cache import KV_AXES, KVCache
from pat_jax.models.policy import Params


def is_upward(source: Layout, target: Layout) -> bool:
    return target.split.tp > source.split.tp


@dataclass(frozen=True)
class Exchange:
    """Which mesh axes change hands between two layouts, as the wider one (more TP) names them."""

    heads: Axes  # axes that split KV heads in the wider layout and rows in the narrower: all-to-all
    copies: Axes  # axes over which the wider layout replicates KV heads: all-gather

    @classmethod
    def between(cls, one: Layout, other: Layout) -> "Exchange":
        narrow, wide = sorted((one, other), key=lambda layout: layout.split.tp)
        taken = wide.tp_axes[len(narrow.tp_axes) :]
        heads = wide.kv_axes[len(narrow.kv_axes) :]
        return cls(heads, tuple(axis for axis in taken if axis not in heads))


def migrate(source: Layout, target: Layout) -> Callable[[KVCache], KVCache]:
    """The KV cache from one layout to another, rows x groups kept: R·k rows a group after a merge of k.

    The order of rows afterwards is `row_order(source, target, rows)`. Going down, the rows of a
    group must be a multiple of the number of groups it splits into.
    """
    exchange = Exchange.between(source, target)

    def up(x: Array) -> Array:
        if exchange.heads:
            x = jax.lax.all_to_all(x, exchange.heads, split_axis=1, concat_axis=0, tiled=True)
        if exchange.copies:
            x = jax.lax.all_gather(x, exchange.copies, axis=0, tiled=True)
        return x

    def down(x: Array) -> Array:
        if exchange.copies:
            rows = x.shape[0] // source.size(exchange.copies)
            mine = jax.lax.axis_index(exchange.copies) * rows
            x = jax.lax.dynamic_slice_in_dim(x, mine, rows)
        if exchange.heads:
            x = jax.lax.all_to_all(x, exchange.heads, split_axis=0, concat_axis=1, tiled=True)
        return x

    move = up if is_upward(source, target) else down
    return jax.shard_map(
        lambda cache: jax.tree.map(move, cache),
        mesh=source.mesh,
        in_specs=source.spec(*KV_AXES),
        out_specs=target.spec(*KV_AXES),
        check_vma=False,
    )


def row_order(source: Layout, target: Layout, rows_per_group: int) -> np.ndarray:
    """Where each row of the target comes from: int[rows], indices into the source's rows.

    Relabelling on the host what the exchange leaves in another order costs nothing; permuting the
    cache on the devices would be a second exchange.
    """
    if not is_upward(source, target):
        ratio = target.split.dp // source.split.dp
        return np.argsort(row_order(target, source, rows_per_group // ratio))
    exchange = Exchange.between(source, target)
    heads, copies = source.size(exchange.heads), source.size(exchange.copies)
    rows = np.arange(source.split.dp * rows_per_group)
    # Source groups count (heads, copies, remaining DP), outermost first; the gather over `copies`
    # comes last and so lies outside the all-to-all over `heads`.
    rows = rows.reshape(heads, copies, target.split.dp, rows_per_group)
    return rows.transpose(2, 1, 0, 3).reshape(-1)


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


def cache_bytes_moved(source: Layout, target: Layout, cache_bytes: int) -> int:
    """Bytes that one device receives when the whole bucket of `cache_bytes` (all devices) migrates."""
    exchange = Exchange.between(source, target)
    narrow, wide = sorted((source, target), key=lambda layout: layout.split.tp)
    shard = cache_bytes // (narrow.split.dp * narrow.size(narrow.kv_axes))
    heads, copies = wide.size(exchange.heads), wide.size(exchange.copies)
    received = shard * (heads - 1) // heads
    return received + (shard * (copies - 1) if is_upward(source, target) else 0)
