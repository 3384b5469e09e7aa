"""The programs that compute pages of known tokens and copy pages."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int, Int16

from pat_jax.engine.sequences.state import LayerPages, Pool
from pat_jax.layout.layout import Layout
from pat_jax.layout.partitions import ManualPartition, by_shard
from pat_jax.models.cache.paged_layer import KV_AXES, PagedLayer
from pat_jax.models.policy import Params, Policy


def prefill(
    policy: Policy, layout: Layout, dtype: jnp.dtype
) -> Callable[[Params, Pool, Array, Array, Array, Array], tuple[Pool, Array]]:
    """Returns the program that computes pages of known tokens for any sequences of a replica.

    Block i of `tokens[blocks, page_size]` begins at position `start[i]`, a multiple of the page
    size, of the sequence whose pages are `tables[i]`. All blocks are written to their pages before
    any of them attends, so that one call may have several blocks of a sequence. An empty block's
    table has only NULL_PAGE; tokens behind a sequence's last are NO_TOKEN. The experts
    `recorded[blocks, page_size, layers, k]` compute the tokens; routers choose where it is
    NOT_RECORDED. Donate the pool.

    The program returns the pool, and the experts that the routers would choose,
    int16[blocks, page_size, layers, k].
    """
    pool: Any = layout.spec(*KV_AXES)
    batch = layout.spec("batch")
    told = layout.spec() if layout.spans_processes else batch

    def run(
        params: Params, pool: Pool, tokens: Array, start: Array, tables: Array, recorded: Array
    ) -> tuple[Pool, Int16[Array, "blocks page_size layers k"]]:
        positions = start[:, None] + jnp.arange(tokens.shape[1])[None, :]
        model = policy.bind(params)
        partition = ManualPartition(layout)
        caches = tuple(PagedLayer(pages.keys, pages.values, tables) for pages in pool)
        _, written, routed = model(
            tokens, positions, caches, recorded=recorded, partition=partition, dtype=dtype
        )
        assert written is not None  # caches went in
        routes = routed.experts
        if layout.spans_processes and layout.dp_axes:  # a host reads its own devices alone
            routes = jax.lax.all_gather(routes, layout.dp_axes, tiled=True)
        return tuple(LayerPages(cache.keys, cache.values) for cache in written), routes

    taken = layout.param_specs(policy), pool, batch, batch, batch, batch
    return by_shard(layout, run, taken, (pool, told))


def copy_pages(layout: Layout) -> Callable[[Pool, Array, Array], Pool]:
    """Returns the program that copies page `source[i]` of each replica to its page `target[i]`.

    No page may be both. Pairs of NULL_PAGE are empty. Donate the pool.
    """

    def run(pool: Pool, source: Int[Array, " pairs"], target: Int[Array, " pairs"]) -> Pool:
        # One page at a time, as in `pages.put`: XLA:CPU may copy the whole pool for a scatter.
        def in_turn(x: Array, source: Array, target: Array) -> Array:
            def copy(pair: Int[Array, ""], x: Array) -> Array:
                page = jax.lax.dynamic_index_in_dim(x, source[pair])
                return jax.lax.dynamic_update_slice(x, page, (target[pair], 0, 0, 0))

            return jax.lax.fori_loop(0, len(source), copy, x)

        def at_once(x: Array, source: Array, target: Array) -> Array:
            return x.at[target].set(x[source])

        return jax.tree.map(
            lambda x: jax.lax.platform_dependent(x, source, target, cpu=in_turn, default=at_once),
            pool,
        )

    pool = layout.spec(*KV_AXES)
    batch = layout.spec("batch")
    return by_shard(layout, run, (pool, batch, batch), pool)
