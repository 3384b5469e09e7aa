"""A decorator for frozen dataclasses that are pytrees, and helpers for pytrees of arrays."""

import dataclasses
import typing
from collections.abc import Iterable
from typing import Any, TypeVar, cast

import jax
import numpy as np
from jax.experimental import multihost_utils

T = TypeVar("T")
Tree = TypeVar("Tree")


def with_sharding(shapes: Tree, shardings: Tree | jax.sharding.Sharding) -> Tree:
    """Returns the `ShapeDtypeStruct` of each array or shape, with its sharding or the only one."""
    if isinstance(shardings, jax.sharding.Sharding):
        shardings = jax.tree.map(lambda _: shardings, shapes)
    return jax.tree.map(
        lambda x, sharding: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding),
        shapes,
        shardings,
    )


def on_devices(tree: Any, devices: Iterable[Any]) -> list[Any]:
    """Returns the arrays or shapes of a tree whose shardings have some of these devices."""
    here = set(devices)
    return [x for x in jax.tree.leaves(tree) if not here.isdisjoint(x.sharding.device_set)]


def without_shards(shapes: Any) -> Any:
    """Returns arrays of these shapes and shardings, whose devices all belong to other processes."""
    make = jax.make_array_from_single_device_arrays
    return jax.tree.map(lambda x: make(x.shape, x.sharding, [], dtype=x.dtype), shapes)


def on_host(x: jax.Array) -> np.ndarray:
    """Returns the whole array. If other processes have parts of it, every process must call this,
    for the same arrays in the same order."""
    if x.is_fully_addressable or x.is_fully_replicated:
        return np.asarray(x)
    return np.asarray(multihost_utils.process_allgather(x, tiled=True))


@typing.dataclass_transform(frozen_default=True)
def pytree_dataclass(cls: type[T]) -> type[T]:
    """Makes `cls` a frozen dataclass and a pytree. Unflattening skips `__init__`, so that type
    checkers do not refuse leaves that are shapes or shardings."""
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
