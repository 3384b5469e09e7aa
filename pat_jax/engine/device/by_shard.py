"""Runs a function of one device's shard on all devices of a layout."""

from collections.abc import Callable
from typing import Any

import jax

from pat_jax.layout.layout import Layout


def by_shard(layout: Layout, run: Callable, in_specs: Any, out_specs: Any) -> Callable:
    """Wraps `run` in `shard_map`: the program has only the collectives written in `run`."""
    specs = {"in_specs": in_specs, "out_specs": out_specs}
    return jax.shard_map(run, mesh=layout.mesh, check_vma=False, **specs)
