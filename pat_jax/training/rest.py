"""Moves arrays between the devices and the host's memory, where they rest between their stages.

Knows trees and shardings. Does not know whose arrays they are.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.multihost_utils import broadcast_one_to_all

from pat_jax.common.devices import in_host_memory
from pat_jax.common.hosts.together import process_group
from pat_jax.common.owners import have_all, is_absent, owners
from pat_jax.common.pytree import on_host, without_shards


def has_more_room(here: float, away: float, sequences: int) -> bool:
    """Whether rollouts of so many sequences need the KV cache that models on the devices displace.

    They do if it holds fewer than all sequences, and would hold more with the models on the host.

    Args:
      here, away: number of sequences at full length that the cache holds if models wait on the
        devices, or in the host's memory.
    """
    return here < min(away, sequences)


def moved(tree: Any, shardings: Any) -> Any:
    """Returns arrays with these shardings, and frees the old buffers of those that were copied."""
    there = jax.device_put(tree, shardings)
    for old, new in zip(*map(jax.tree.leaves, (tree, there)), strict=True):
        if _is_copy(old, new):
            old.delete()  # JAX donates nothing from one memory to another
    return there


def copied_to(params: Any, like: Any) -> Any:
    """Returns copies of parameters in the dtypes and on the shards of `like`, which may be on
    other devices."""

    def cast(params: Any) -> Any:
        return jax.tree.map(lambda x, to: jnp.array(x, to.dtype, copy=True), params, like)

    shardings = jax.tree.map(lambda x: x.sharding, like)
    devices = {frozenset(x.sharding.device_set) for x in jax.tree.leaves((params, like))}
    if len(devices) == 1:
        if is_absent(next(iter(devices))):
            return without_shards(like)
        return jax.jit(cast, out_shardings=shardings)(params)
    if all(x.sharding.is_fully_addressable for x in jax.tree.leaves(params)):
        return jax.device_put(cast(params), shardings)
    return jax.tree.map(_copied_by_host, params, like)


def _copied_by_host(x: jax.Array, like: Any) -> jax.Array:
    """Returns a copy of an array whose shards belong to several processes. It is gathered on its
    devices, and sent to the other processes, because each process needs the whole array."""
    devices = x.sharding.device_set
    host = np.zeros(x.shape, like.dtype) if is_absent(devices) else on_host(x.astype(like.dtype))
    if not have_all(devices):
        is_first = process_group().index == owners(devices)[0]
        host = broadcast_one_to_all(host, is_source=is_first)
    return jax.make_array_from_callback(
        host.shape, like.sharding, lambda part: host[part], dtype=like.dtype
    )


def at_rest(shardings: Any) -> Any:
    """Returns the shardings in the host's memory."""
    return jax.tree.map(in_host_memory, shardings)


@contextmanager
def fetched(tree: Any, shardings: Any) -> Iterator[Any]:
    """Yields the arrays with these shardings. At the end, the copies that were made are freed as
    soon as no running program reads them. Arrays that already had these shardings stay."""
    here = jax.device_put(tree, shardings)
    try:
        yield here
    finally:
        for old, new in zip(*map(jax.tree.leaves, (tree, here)), strict=True):
            if _is_copy(old, new):
                new.delete()


def _is_copy(old: jax.Array, new: jax.Array) -> bool:
    """Whether `new`, which `jax.device_put` made from `old`, has buffers of its own.

    Equivalent shardings need not be equal: one may name a dimension that the other leaves out.
    `jax.device_put` then returns another array of the same buffers.
    """
    return not old.sharding.is_equivalent_to(new.sharding, old.ndim)
