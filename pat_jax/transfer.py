"""The programs that hand the trainer's parameters to the rollout, and those that check what arrived."""

from collections.abc import Mapping

import jax
import jax.numpy as jnp
from jaxtyping import Array

from pat_jax.engine.layout import Layout
from pat_jax.engine.programs import Key, ProgramTable
from pat_jax.models.policy import Params, Policy
from pat_jax.planning.types import Split
from pat_jax.pytree import with_sharding


def declare_transfer(
    table: ProgramTable,
    params: Params,
    source: Layout,
    policy: Policy,
    targets: Mapping[Split, Layout],
    dtype: jnp.dtype,
) -> None:
    """`transfer` to each target, and the `checksum` of what is sent and of what is there.

    Args:
      params: shapes of the trainer's parameters on the shards of `source`, float32.
      policy: as the rollout keeps it, in `dtype` where that quantizes nothing.
    """
    gathered = source.param_shardings(policy)

    def transfer(params: Params) -> Params:
        # A copy even where nothing changes: the rollout deletes what it was given. Gathered over
        # FSDP first, re-sliced after: the partitioner finds no way to do both at once. Quantized
        # before either, so that every layout gets the same numbers.
        return jax.tree.map(
            lambda x, whole: jax.lax.with_sharding_constraint(jnp.copy(x), whole),
            policy.store(params, dtype),
            gathered,
        )

    def sent(params: Params) -> Array:
        return checksum(policy.store(params, dtype))

    table.declare(Key("checksum", source.split), sent, params)
    for split, target in targets.items():
        shardings = target.param_shardings(policy)
        key = Key("transfer", source.split, target=split)
        table.declare(key, transfer, params, out_shardings=shardings)
        received = with_sharding(policy.abstract(dtype), shardings)
        table.declare(Key("checksum", source.split, target=split), checksum, received)


def checksum(params: Params) -> Array:
    """Of bits, modulo 2^32: the same in whatever order a layout adds them up.

    Odd factors tell leaves that changed places.
    """
    total = jnp.zeros((), jnp.uint32)
    for i, x in enumerate(jax.tree.leaves(params)):
        total += jnp.uint32(2 * i + 1) * jnp.sum(_bits(x), dtype=jnp.uint32)
    return total


def _bits(x: Array) -> Array:
    unsigned = jnp.dtype(f"uint{8 * x.dtype.itemsize}")
    return jax.lax.bitcast_convert_type(x, unsigned).astype(jnp.uint32)
