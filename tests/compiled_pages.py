"""A child process that compiles attention to pages for a TPU.

    python compiled_pages.py TARGET

Prints one JSON line: for each shape its kernels, and its largest copy as a share of a pool.
"""

import json
import os
import sys
from typing import Any

import jax
from hlo_text import largest_copy
from jax.sharding import SingleDeviceSharding

from pat_jax.models.kernels.paged_tpu import attend_blocks_on_tpu
from pat_jax.profiling.cross_compile.worker import devices_of
from pat_jax.profiling.predict.targets import Target

ROWS, WIDTH, DIM = 8, 1536, 128
# Queries of a row, KV heads, queries that share one, tokens of a page, and whether rows branch.
SHAPES = [
    (1, 8, 4, 16, False),
    (1, 1, 4, 16, False),
    (1, 1, 8, 128, False),
    (16, 8, 4, 16, False),
    (6, 8, 5, 16, True),
]


def found(target: Target, shape: tuple[int, int, int, int, bool]) -> tuple[int, float]:
    length, heads, group, page_size, branches = shape
    sharding = SingleDeviceSharding(devices_of(target)[0])

    def of(dtype: str, *sides: int) -> Any:
        return jax.ShapeDtypeStruct(sides, dtype, sharding=sharding)

    pool = of("bfloat16", ROWS * WIDTH + 1, heads, page_size, DIM)
    queries, table = of("bfloat16", ROWS, length, heads, group, DIM), of("int32", ROWS, WIDTH)
    numbers = [of("int32", ROWS)] * (1 + branches)
    text = (
        attend_blocks_on_tpu.lower(queries, pool, pool, table, *numbers).compile().as_text() or ""
    )
    size = pool.size * pool.dtype.itemsize
    return text.count('custom_call_target="tpu_custom_call"'), largest_copy(text) / size


if __name__ == "__main__":
    with os.fdopen(os.dup(1), "w") as lines:
        os.dup2(2, 1)  # what compilers print is not ours
        target = Target.parse(sys.argv[1])
        lines.write(json.dumps([found(target, shape) for shape in SHAPES]))
