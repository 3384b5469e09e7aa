"""Measures one sum over the tensor-parallel devices, by the bytes that each of them holds."""

import time
from collections.abc import Iterable, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from pat_jax.layout.layout import Layout

SIZES = tuple(2**k for k in range(12, 25, 2))  # bytes a device: 4 KiB to 16 MiB
RUNS = 3  # of which the fastest counts
IN_A_ROW = 8  # sums of one program: a single one would measure its launch


def all_reduce_seconds(
    layouts: Iterable[Layout], dtype: jnp.dtype, sizes: Sequence[int] = SIZES
) -> dict[tuple[str, int, int], float]:
    """Seconds of one all-reduce, by ("all-reduce", devices, bytes a device)."""
    seconds = {}
    for layout in layouts:
        for size in sizes if layout.tp_axes else ():
            seconds[("all-reduce", layout.split.tp, size)] = _time(layout, dtype, size)
    return seconds


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
