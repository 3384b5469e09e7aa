"""A frozen dataclass that is a pytree, and pytrees of arrays and shapes."""

import dataclasses
import typing
from collections.abc import Iterable
from typing import Any, TypeVar, cast

import jax
import numpy as np
from jax.experimental import multihost_utils

T = TypeVar("T")
Tree = TypeVar("Tree")


def with_sharding(shapes: Tree, shardings: Tree) -> Tree:
    """Arrays or shapes as the shapes of arrays that will have these shardings."""
    return jax.tree.map(
        lambda x, sharding: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding),
        shapes,
        shardings,
    )


def on_host(x: jax.Array) -> np.ndarray:
    """All of an array; where others have parts of it, every process asks for it in one order."""
    if x.is_fully_addressable or x.is_fully_replicated:
        return np.asarray(x)
    return np.asarray(multihost_utils.process_allgather(x, tiled=True))


@typing.dataclass_transform(frozen_default=True)
def pytree_dataclass(cls: type[T]) -> type[T]:
    """Registers `cls` so that its leaves may be shapes or shardings as well as arrays: unflattening
    skips `__init__`, where type checkers would refuse them."""
    cls = dataclasses.dataclass(frozen=True)(cls)
    names = [f.name for f in dataclasses.fields(cast(Any, cls))]

    def flatten(obj: T) -> tuple[list[tuple[Any, Any]], None]:
        return [(jax.tree_util.GetAttrKey(name), getattr(obj, name)) for name in names], None

    def unflatten(_: None, children: Iterable[Any]) -> T:
        obj = object.__new__(cls)
        for name, child in zip(names, children, strict=True):
            object.__setattr__(obj, name, child)
        return obj

    jax.tree_util.register_pytree_with_keys(cls, flatten, unflatten)
    return cls
