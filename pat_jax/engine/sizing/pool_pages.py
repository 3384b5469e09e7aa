"""How many pages the pools of a rollout have, and what its programs are made of."""

import math
from collections.abc import Mapping, Sequence

import jax.numpy as jnp

from pat_jax.common.errors import UserError
from pat_jax.config.rollout import RolloutConfig
from pat_jax.engine.device.decode.decode import DecodeFunctions
from pat_jax.engine.device.draft.drafter import Drafter
from pat_jax.engine.device.programs.program_specs import RESHARD_CHUNK_BYTES, ProgramSpecs
from pat_jax.engine.sequences.page_allocator import num_pages_for
from pat_jax.layout.buckets import Buckets
from pat_jax.layout.layout import Layout
from pat_jax.models.config import ModelConfig
from pat_jax.models.policy import Policy
from pat_jax.planning.types import Split


def specs_for(
    config: RolloutConfig,
    policy: Policy,
    drafter: Drafter,
    layouts: dict[Split, Layout],
    buckets: Buckets,
    pages: dict[Split, int],
    reshard_chunk_bytes: int = RESHARD_CHUNK_BYTES,
    *,
    dtype: jnp.dtype,
    eos_ids: Sequence[int],
    first: Buckets | None = None,
) -> ProgramSpecs:
    """The programs of a rollout with these options; the others are `ProgramSpecs`'."""
    steps = config.check_every, config.burst_steps, config.max_logprobs
    functions = DecodeFunctions(policy, dtype, tuple(eos_ids), *steps, drafter)
    sizes = config.page_size, pages, config.prefill_blocks, reshard_chunk_bytes
    return ProgramSpecs(functions, layouts, buckets, *sizes, first)


def pages_within(
    kv_bytes: float,
    config: RolloutConfig,
    model: ModelConfig,
    layouts: Mapping[Split, Layout],
    buckets: Buckets,
    dtype: jnp.dtype,
) -> dict[Split, int]:
    """As `pages_per_replica`, of what the KV cache may take of a device."""
    most, unsplit = kv_bytes // page_bytes(model, config.page_size, dtype), config.kv_pages
    return pages_per_replica(layouts, buckets, config.page_size, unsplit=unsplit, most=most)


def pages_per_replica(
    layouts: Mapping[Split, Layout],
    buckets: Buckets,
    page_size: int,
    *,
    unsplit: int = 0,
    most: float = math.inf,
) -> dict[Split, int]:
    """Pages of each layout's pools, NULL_PAGE among them.

    A device has the same bytes of them in every layout: one that splits the KV heads in f ways has
    f times as many pages in a replica.

    Args:
      unsplit: pages of a replica whose KV heads are not split; 0: as many as let every row of every
        layout's largest bucket grow to its full length, but no more than `most`.

    Returns:
      At least what the longest sequence needs alone.

    Raises:
      UserError: `unsplit` is less than that.
    """
    longest = buckets.lengths[-1]
    least = max(unsplit_pages(layout, 1, longest, page_size) for layout in layouts.values())
    if unsplit and unsplit < least:
        raise UserError(
            f"option --rollout.kv_pages is {unsplit}: expected at least {least}, so that a sequence "
            f"of {longest} tokens fits alone in pages of {page_size}."
        )
    full = max(
        unsplit_pages(layout, buckets.rows[split][-1], longest, page_size)
        for split, layout in layouts.items()
    )
    unsplit = unsplit or max(least, int(min(full, most)))
    return {split: unsplit * layout.size(layout.kv_axes) for split, layout in layouts.items()}


def unsplit_pages(layout: Layout, rows: int, length: int, page_size: int) -> int:
    """Pages with all KV heads that are as many bytes of a device as a replica of `layout` needs for
    `rows` sequences of `length` tokens and NULL_PAGE."""
    pages = rows * num_pages_for(length, page_size) + 1
    return -(-pages // layout.size(layout.kv_axes))


def page_bytes(config: ModelConfig, page_size: int, dtype: jnp.dtype) -> int:
    """Bytes of one page with all KV heads, in all layers."""
    tokens = 2 * config.num_layers * page_size
    return tokens * config.num_kv_heads * config.head_dim * jnp.dtype(dtype).itemsize
