"""Lets Orbax's checkpoints hold arrays that only some processes have.

In Orbax each process has a shard of each array, and process 0 writes all metadata. Here the owners
of an array write it, and the first of them writes its metadata. Knows Orbax and who owns which
devices. Does not know what is saved.
"""

from collections.abc import Sequence
from typing import Any

import jax
import orbax.checkpoint as ocp

from pat_jax.common.owners import is_absent, owners
from pat_jax.common.pytree import without_shards
from pat_jax.run.checkpoints.orbax_io import silence

_Handler = ocp.type_handlers.ArrayHandler


class _OwnedArrays(_Handler):
    def memory_size(self, values: Sequence[jax.Array]) -> Sequence[tuple[int, int]]:
        # Only early versions of Orbax 0.12 have and ask for this.
        of_orbax: Any = super()
        are_here = [not is_absent(x.sharding.device_set) for x in values]
        pairs = zip(values, are_here, strict=True)
        sizes = iter(of_orbax.memory_size([x for x, is_here in pairs if is_here]))
        return [next(sizes) if is_here else (0, 0) for is_here in are_here]

    async def serialize(
        self, values: Sequence[jax.Array], infos: Sequence[Any], args: Sequence[Any] | None = None
    ) -> Sequence[Any]:
        alike: dict[int, list[tuple[jax.Array, Any, Any]]] = {}  # by the first owner
        for one in zip(values, infos, args or [ocp.SaveArgs()] * len(values), strict=True):
            devices = one[0].sharding.device_set
            if not is_absent(devices):
                alike.setdefault(owners(devices)[0], []).append(one)
        written: list[Any] = []
        for first, some in alike.items():
            handler = _Handler(primary_host=first, enable_write_sharding_file=False)
            written += await handler.serialize(*map(list, zip(*some, strict=True)))
        return written

    async def deserialize(
        self, infos: Sequence[Any], args: Sequence[Any] | None = None
    ) -> Sequence[jax.Array]:
        assert args is not None, "who restores gives shapes with shardings"
        found: dict[int, jax.Array] = {}
        here = []
        for i, asked in enumerate(args):
            if is_absent(asked.sharding.device_set):
                how = {"dtype": asked.dtype, "sharding": asked.sharding}
                found[i] = without_shards(jax.ShapeDtypeStruct(asked.global_shape, **how))
            else:
                here.append(i)
        if here:
            read = await super().deserialize([infos[i] for i in here], [args[i] for i in here])
            found |= dict(zip(here, read, strict=True))
        return [found[i] for i in range(len(args))]


def register() -> None:
    """From now on Orbax writes and reads arrays that some processes own alone."""
    silence()  # it warns of what is replaced
    handler = _OwnedArrays(enable_write_sharding_file=False)
    ocp.type_handlers.register_type_handler(jax.Array, handler, override=True)
