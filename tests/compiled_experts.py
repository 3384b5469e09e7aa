"""A child process that compiles one layer of experts for a machine that is not here.

    python compiled_experts.py TARGET ROWS EXPERTS_HERE WAY {forward|backward} [TEXT]

The layer is Qwen3-30B-A3B's: 8 of 128 experts of 2048 x 768. Prints one JSON line. TEXT is a file
for what it was compiled to.
"""

import json
import os
import sys
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from pat_jax.models.experts import _compute
from pat_jax.models.kernels.kernel_choice import ANYWHERE, Kernels
from pat_jax.models.partition import Rows
from pat_jax.models.weight_formats import abstract_weight
from pat_jax.profiling.cross_compile.worker import devices_of
from pat_jax.profiling.predict.targets import Target

EMBED, DIM, NUM_EXPERTS, PER_TOKEN = 2048, 768, 128, 8


def shapes_of(rows: int, here: int, weights: Any, sharding: Any) -> tuple[Rows, Any]:
    """Rows with their experts and shares, and the experts that are here."""
    of_rows = [((rows, 1, EMBED), jnp.bfloat16), ((rows, 1, PER_TOKEN), jnp.int32)]
    of_rows += [((rows, 1, PER_TOKEN), jnp.float32)]
    x = Rows(*(jax.ShapeDtypeStruct(*one, sharding=sharding) for one in of_rows))
    stacks = [(here, DIM, EMBED), (here, DIM, EMBED), (here, EMBED, DIM)]
    kept = [abstract_weight(one, 1, weights) for one in stacks]

    def placed(leaf: Any) -> Any:
        dtype = jnp.bfloat16 if weights == "auto" else leaf.dtype
        return jax.ShapeDtypeStruct(leaf.shape, dtype, sharding=sharding)

    return x, jax.tree.map(placed, tuple(kept))


def main(target: str, rows: str, here: str, way: str, passes: str, *text: str) -> None:
    mesh = jax.sharding.Mesh(devices_of(Target.parse(target))[:1], ("all",))
    sharding = jax.NamedSharding(mesh, jax.P())
    platform, weights = mesh.devices.flat[0].platform, way if way in ("int8", "fp8") else "auto"
    kernels = ANYWHERE if way == "plain" else Kernels.of(platform)
    layer = partial(_compute, num_experts=NUM_EXPERTS, kernels=kernels)

    def forward(rows: Rows, experts: Any) -> jax.Array:
        return layer(rows, experts, 0)

    def backward(rows: Rows, experts: Any) -> Any:
        def compute(x: Any, experts: Any) -> jax.Array:
            return layer(rows._replace(x=x), experts, 0)

        return jax.vjp(compute, rows.x, experts)[1](rows.x)

    function = {"forward": forward, "backward": backward}[passes]
    shapes = shapes_of(int(rows), int(here), weights, sharding)
    compiled = jax.jit(function, out_shardings=sharding).lower(*shapes).compile()
    words, memory, cost = compiled.as_text() or "", compiled.memory_analysis(), {}
    if platform == "tpu":
        cost: Any = compiled.cost_analysis()
    assert memory is not None
    if text:
        Path(text[0]).write_text(words)
    calls = sum(words.count(f'custom_call_target="{name}"') for name in ("tpu_custom_call",))
    calls += words.count("__gpu$xla.gpu.triton")
    found = {"temporaries": memory.temp_size_in_bytes, "kernels": calls}
    found |= {"flops": cost.get("flops"), "bytes": cost.get("bytes accessed")}
    print(json.dumps(found))


if __name__ == "__main__":
    with os.fdopen(os.dup(1), "w") as lines:
        os.dup2(2, 1)  # what compilers print is not ours
        sys.stdout = lines
        main(*sys.argv[1:])
