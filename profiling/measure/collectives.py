"""Measures an all-reduce over the devices of a replica, by the bytes that each of them holds."""

import time
from collections.abc import Iterable

import jax
import jax.numpy as jnp
import numpy as np

from pat_jax.layout.layout import Layout

SIZES = (2**12, 2**24)  # bytes of a device: few for the latency, many for the bandwidth
RUNS = 3  # timed runs, of which the fastest counts
IN_A_ROW = 8  # all-reduces of one program: a single one would measure its launch


def all_reduce_seconds(layouts: Iterable[Layout], dtype: jnp.dtype) -> dict[tuple[int, int], float]:
    """Returns the seconds of one all-reduce, by the number of devices and the bytes of each."""
    return {
        (layout.split.tp, size): _time(layout, dtype, size)
        for layout in layouts
        if layout.tp_axes
        for size in SIZES
    }


def _time(layout: Layout, dtype: jnp.dtype, size: int) -> float:
    def several(x: jax.Array) -> jax.Array:
        for _ in range(IN_A_ROW):
            x = jax.lax.psum(x, layout.tp_axes) * 0.5
        return x

    spec = layout.spec()
    several = jax.jit(
        jax.shard_map(several, mesh=layout.mesh, in_specs=spec, out_specs=spec, check_vma=False)
    )
    ones = np.ones(size // jnp.dtype(dtype).itemsize, dtype)
    x = jax.block_until_ready(several(layout.put(ones)))
    fastest = float("inf")
    for _ in range(RUNS):
        start = time.perf_counter()
        x = jax.block_until_ready(several(x))
        fastest = min(fastest, time.perf_counter() - start)
    return fastest / IN_A_ROW
