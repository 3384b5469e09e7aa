"""A rollout's buckets and pages, and the specs by which its programs are compiled."""

from collections.abc import Mapping, Sequence

import jax.numpy as jnp

from pat_jax.common.errors import UserError
from pat_jax.config.rollout import RolloutConfig
from pat_jax.engine.device.draft.drafter import Drafter
from pat_jax.engine.device.programs.decode import DecodeFunctions
from pat_jax.engine.device.programs.program_specs import RESHARD_CHUNK_BYTES, ProgramSpecs
from pat_jax.engine.sequences.page_allocator import num_pages_for
from pat_jax.layout.buckets import Buckets
from pat_jax.layout.layout import Layout
from pat_jax.models.cache.paged_layer import reads_what_rows_hold
from pat_jax.models.config import ModelConfig
from pat_jax.models.kernels.kernel_choice import OVER_PAGES
from pat_jax.models.policy import Policy
from pat_jax.planning.types import Split


def buckets_of(
    layouts: Mapping[Split, Layout], capacity: int, config: RolloutConfig, model: ModelConfig
) -> Buckets:
    """Returns the buckets of a rollout in these layouts, with rows for `capacity` sequences."""
    kernels = next(iter(layouts.values())).kernels
    is_held = reads_what_rows_hold(kernels, config.page_size, model.head_dim, OVER_PAGES)
    return Buckets.of(tuple(layouts), capacity, config, "held" if is_held else "bucket")


def specs_for(
    config: RolloutConfig,
    policy: Policy,
    drafter: Drafter,
    dtype: jnp.dtype,
    eos_ids: Sequence[int],
    layouts: dict[Split, Layout],
    buckets: Buckets,
    pages: dict[Split, int],
    reshard_bytes: int = RESHARD_CHUNK_BYTES,
    first: Buckets | None = None,
) -> ProgramSpecs:
    """Returns the specs of a rollout's programs with these options; see `ProgramSpecs`."""
    steps = config.burst_steps
    functions = DecodeFunctions(
        policy, dtype, tuple(eos_ids), config.check_every, steps, config.max_logprobs, drafter
    )
    blocks = config.prefill_blocks
    return ProgramSpecs(
        functions, layouts, buckets, config.page_size, pages, blocks, reshard_bytes, first
    )


def pages_per_replica(
    kv_bytes: float,
    config: RolloutConfig,
    model: ModelConfig,
    layouts: Mapping[Split, Layout],
    buckets: Buckets,
    dtype: jnp.dtype,
) -> dict[Split, int]:
    """Returns the pages of a replica's pool in each layout, NULL_PAGE included. Raises UserError if
    the pages asked for do not hold the longest sequence.

    Pools take the same bytes of a device in every layout. So a layout that splits the KV heads over
    f devices has f times as many pages per replica. Every pool can hold the longest sequence.
    Unless a number is asked for, the pages are enough for every row of every layout's largest
    bucket at full length, but take at most `kv_bytes` per device.
    """
    size = config.page_size
    longest = buckets.lengths[-1]
    least = max(unsplit_pages(layout, 1, longest, size) for layout in layouts.values())
    unsplit = config.kv_pages
    if unsplit and unsplit < least:
        raise UserError(
            f"option --rollout.kv_pages is {unsplit}: expected at least {least}, so that a sequence "
            f"of {longest} tokens fits alone in pages of {size}."
        )
    full = max(
        unsplit_pages(layout, buckets.rows[split][-1], longest, size)
        for split, layout in layouts.items()
    )
    most = kv_bytes // page_bytes(model, size, dtype)
    unsplit = unsplit or max(least, int(min(full, most)))
    return {split: unsplit * layout.size(layout.kv_axes) for split, layout in layouts.items()}


def unsplit_pages(layout: Layout, rows: int, length: int, page_size: int) -> int:
    """Returns the size of a pool that holds `rows` sequences of `length` tokens and NULL_PAGE.

    It is counted in pages with all KV heads: if f devices divide these, f pages count as one."""
    pages = rows * num_pages_for(length, page_size) + 1
    return -(-pages // layout.size(layout.kv_axes))


def page_bytes(config: ModelConfig, page_size: int, dtype: jnp.dtype) -> int:
    """Returns the bytes of one page with all KV heads, in all layers."""
    tokens = 2 * config.num_layers * page_size
    return tokens * config.num_kv_heads * config.head_dim * jnp.dtype(dtype).itemsize
