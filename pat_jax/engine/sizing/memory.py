"""The memory of a device that the parts of a run take, and how much is left for the KV cache.

Knows layouts, shardings and options. Does not know how a plan uses the answer.
"""

import math
from collections.abc import Mapping, Sequence
from itertools import combinations
from typing import Any

import jax
import jax.numpy as jnp

from pat_jax.common.devices import Device
from pat_jax.common.pytree import with_sharding
from pat_jax.config.rollout import RolloutConfig
from pat_jax.engine.device.draft.drafter import Drafter, DraftShapes
from pat_jax.engine.device.draft.drafters import NO_DRAFTER
from pat_jax.engine.device.pages.pages import Exchange
from pat_jax.engine.device.programs.program_specs import RESHARD_CHUNK_BYTES, ProgramSpecs
from pat_jax.engine.relocation.rounds import SIZES
from pat_jax.engine.sizing.device_memory import cache_limit, memory_limit
from pat_jax.engine.sizing.draft_memory import draft_bytes
from pat_jax.engine.sizing.memory_checks import layouts_without_memory
from pat_jax.engine.sizing.pool_pages import page_bytes, unsplit_pages
from pat_jax.layout.buckets import Buckets, largest_length
from pat_jax.layout.layout import Layout, shard_bytes
from pat_jax.models.policy import Policy
from pat_jax.planning.memory import USABLE, DraftBytes, MemoryModel, beside
from pat_jax.planning.types import Split


def most_at_once(
    policy: Policy,
    layouts: Mapping[Split, Layout],
    config: RolloutConfig,
    dtype: jnp.dtype,
    devices: Sequence[Device],
) -> int:
    """Returns how many sequences may run at once; others wait.

    On accelerators these are all sequences of an iteration. On a CPU, where bursts read contiguous
    copies of the KV cache, they are at most as many as fit in memory at full length."""
    wanted = config.num_responses
    if devices[0].platform != "cpu" or math.isinf(
        limit := cache_limit(config.device_memory_gib, devices)
    ):
        return wanted
    longest = largest_length(config.max_length, config.min_length)
    whole = longest * page_bytes(policy.config, config.page_size, dtype) / config.page_size
    fitting = min(
        split.dp * max(1, int(limit * layout.size(layout.kv_axes) / whole))
        for split, layout in layouts.items()
    )
    widest = max(split.dp for split in layouts)
    return min(wanted, max(widest, fitting // widest * widest))


def kv_bytes(
    policy: Policy,
    layouts: Mapping[Split, Layout],
    config: RolloutConfig,
    dtype: jnp.dtype,
    *,
    limit: float,
    resident: Any,
    drafter: Drafter = NO_DRAFTER,
) -> float:
    """Returns the bytes per device that the KV cache may take in every layout and every switch.

    Args:
      limit: memory of a device, in bytes.
      resident: a tree of shapes with shardings: arrays that stay on the devices during a rollout.
      drafter: proposes the drafts of bursts; its state takes memory, too.
    """
    if math.isinf(limit):
        return math.inf
    weights = _weights(policy, layouts, dtype)
    drafted = _drafted(policy, layouts, config, dtype, drafter)
    most = max(weights[split] + beside(x.source, x.steps, limit) for split, x in drafted.items())
    left = USABLE * limit - shard_bytes(resident) - most
    one_page = page_bytes(policy.config, config.page_size, dtype)
    # Staged pages between replicas of a layout: a packed buffer and an arrived one.
    shifted = max(2 * (split.dp > 1) for split in layouts) * SIZES[0] * one_page
    if len(layouts) == 1:
        return max(0.0, left - shifted)
    most_parts = max(
        exchange.most_staged / exchange.num_heads
        for exchange in (Exchange.between(a, b) for a, b in combinations(layouts.values(), 2))
    )
    # A switch holds a chunk of the weights twice, and staged pages.
    left -= _chunk(jax.tree.leaves(policy.abstract(dtype)), RESHARD_CHUNK_BYTES)
    return max(0.0, left - max(shifted, SIZES[0] * most_parts * one_page))


def whole_sequences(
    policy: Policy,
    layouts: Mapping[Split, Layout],
    config: RolloutConfig,
    dtype: jnp.dtype,
    **held: Any,
) -> float:
    """Returns how many of the longest sequences have room in the KV cache at once.

    It is the number in the layout that divides the cache over most devices. It is 0 if no layout
    fits, and infinite if the memory of a device is unknown.

    Args:
      held: `limit`, `resident` and `drafter`, as in `kv_bytes`.
    """
    without = layouts_without_memory(memory_alone(policy, layouts, config, dtype, **held), config)
    kept = {split: layout for split, layout in layouts.items() if split not in without}
    if not kept:
        return 0.0
    longest = largest_length(config.max_length, config.min_length)
    whole = longest * page_bytes(policy.config, config.page_size, dtype) / config.page_size
    ways = max(split.dp * layout.size(layout.kv_axes) for split, layout in kept.items())
    return ways * kv_bytes(policy, kept, config, dtype, **held) / whole


def _weights(policy: Policy, layouts: Mapping[Split, Layout], dtype: jnp.dtype) -> dict[Split, int]:
    """The bytes of the weights per device in each layout."""
    abstract = policy.abstract(dtype)
    return {
        split: shard_bytes(with_sharding(abstract, layout.param_shardings(policy)))
        for split, layout in layouts.items()
    }


def _drafted(
    policy: Policy,
    layouts: Mapping[Split, Layout],
    config: RolloutConfig,
    dtype: jnp.dtype,
    drafter: Drafter,
) -> dict[Split, DraftBytes]:
    """The bytes that drafts need per device in each layout, before there are programs."""
    sequences = config.num_responses
    buckets = Buckets.of(tuple(layouts), sequences, config)
    shapes = DraftShapes(policy.config, dtype, buckets, config.page_size, config.prefill_blocks)
    return draft_bytes(layouts, shapes, drafter)


def _chunk(leaves: Sequence[Any], limit: int) -> int:
    """The bytes, over all devices, of the largest chunk of weights that is resharded at once."""
    sizes = [x.size * x.dtype.itemsize for x in leaves]
    return min(max(limit, *sizes), sum(sizes))


def memory_alone(
    policy: Policy,
    layouts: Mapping[Split, Layout],
    config: RolloutConfig,
    dtype: jnp.dtype,
    *,
    limit: float,
    resident: Any,
    drafter: Drafter = NO_DRAFTER,
) -> MemoryModel:
    """Returns the memory that each layout takes of a device if no other layout is used.

    The layout's pool is the smallest that holds the longest sequence, or as large as the options
    say. Nothing is added for switches.

    Args:
      limit, resident, drafter: see `kv_bytes`.
    """
    longest = largest_length(config.max_length, config.min_length)
    ways = {split: layout.size(layout.kv_axes) for split, layout in layouts.items()}
    unsplit = {
        split: max(config.kv_pages, unsplit_pages(layout, 1, longest, config.page_size))
        for split, layout in layouts.items()
    }
    one_page = page_bytes(policy.config, config.page_size, dtype)
    return MemoryModel(
        limit=limit,
        resident=shard_bytes(resident),
        weights=_weights(policy, layouts, dtype),
        page={split: one_page // ways[split] for split in layouts},
        pages={split: unsplit[split] * ways[split] for split in layouts},
        page_size=config.page_size,
        chunk=0,
        staging=0,
        ahead=config.check_every,
        drafts=_drafted(policy, layouts, config, dtype, drafter),
    )


def memory_model(
    specs: ProgramSpecs, config: RolloutConfig, *, limit: float, resident: Any
) -> MemoryModel:
    """Returns the memory that the layouts of `specs` take of a device.

    Args:
      limit, resident: see `kv_bytes`.
    """
    layouts = specs.layouts.values()
    params = {layout.split: specs.params(layout) for layout in layouts}
    leaves = jax.tree.leaves(next(iter(params.values())))
    pools = {layout.split: shard_bytes(specs.pool(layout)) for layout in layouts}
    return MemoryModel(
        limit=limit,
        resident=shard_bytes(resident),
        weights={split: shard_bytes(tree) for split, tree in params.items()},
        page={split: pools[split] // specs.pages[split] for split in pools},
        pages=specs.pages,
        page_size=specs.page_size,
        chunk=_chunk(leaves, specs.reshard_chunk_bytes),
        staging=specs.staging_bytes,
        ahead=config.check_every,
        drafts=draft_bytes(specs.layouts, specs.draft_shapes, specs.drafter),
    )


def engine_memory(specs: ProgramSpecs, config: RolloutConfig, resident: Any = ()) -> MemoryModel:
    """Returns the memory that a rollout's layouts take of a device if nothing is trained.

    Args:
      resident: as in `memory_model`.
    """
    first = next(iter(specs.layouts.values()))
    limit = memory_limit(config.device_memory_gib, list(first.mesh.devices.flat))
    return memory_model(specs, config, limit=limit, resident=resident)
