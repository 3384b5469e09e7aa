"""What training attention takes of a device that is not there: temporaries, and products it computes.

    python -m benchmarks.attention_temporaries --out benchmarks/results/attention_temporaries.json

Needs the extra `plan` and no accelerator. One row of 16,384 tokens of Llama-3.1-8B in bfloat16 on one
device, forward and backward: its attention alone, and a whole layer as the trainer runs it, which
computes it anew in the backward pass. `kernel` is what is chosen there (`models/row_attention.py`), `all keys`
what was before: every key for each block of queries, masked. Products are those that XLA compiles, from the
program's text; those of kernels are told by the blocks that they look at.
"""

import argparse
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array

from benchmarks import on_targets
from pat_jax.engine.layout.layout import AutoPartition, Layout, factored_mesh, make_layout
from pat_jax.models import row_attention, row_attention_gpu, row_attention_tpu
from pat_jax.models.config import ModelConfig
from pat_jax.models.layers import Rotation, attend
from pat_jax.models.parameters import Keys
from pat_jax.models.presets import preset
from pat_jax.models.row_bounds import key_blocks, seen_keys
from pat_jax.models.transformer import CONTEXT, QUERIES, Layer, _run_layer
from pat_jax.profiling.cross_compile import hlo_costs
from pat_jax.profiling.cross_compile.worker import devices_of
from pat_jax.profiling.predict.targets import Target

TARGETS = ("v5e:1x1", "v6e:1x1", "a100:1", "h100:1")
MODEL, LENGTH = "llama-3.1-8b", 16_384
WAYS, PROGRAMS = ("kernel", "all keys"), ("attention", "layer")
PACKED = 2_048  # tokens of each sequence of a packed row


def all_keys(queries: Array, keys: Array, values: Array, positions: Array) -> Array:
    """Causal attention without blocks that are left out, as it was before there were kernels."""
    del positions
    positions = jnp.arange(queries.shape[1])[None]
    return attend(queries, keys, values, jnp.broadcast_to(positions, queries.shape[:2]))


def describe(function: Callable[..., Any], args: Sequence[Any]) -> dict[str, float]:
    compiled = jax.jit(function).lower(*args).compile()
    memory = compiled.memory_analysis()
    assert memory is not None  # both compilers report it
    counted = hlo_costs.count(compiled.as_text() or "")
    return {
        "temporaries_mib": round(memory.temp_size_in_bytes / 2**20, 1),
        "products_tflop": round(counted.flops / 1e12, 3),
    }


def attention_gradients(partition: AutoPartition) -> Callable[..., Any]:
    """As a layer has its arrays: keys and values by token."""

    def gradients(queries: Array, keys: Array, values: Array, positions: Array, grads: Array):
        def run(queries: Array, keys: Array, values: Array) -> Array:
            attend = row_attention.attend_rows
            return partition.on_shards(
                lambda *x: attend(*x, kernels=partition.kernels),
                [
                    (queries, QUERIES),
                    (jnp.swapaxes(keys, 1, 2), CONTEXT),
                    (jnp.swapaxes(values, 1, 2), CONTEXT),
                    (positions, ("batch", None)),
                ],
                QUERIES,
            )

        return jax.vjp(run, queries, keys, values)[1](grads)

    return gradients


def layer_gradients(partition: AutoPartition, definition: Any) -> Callable[..., Any]:
    def gradients(params: Any, x: Array, positions: Array, angles: Any, grads: Array):
        rotation = Rotation(*angles)

        def run(params: Any, x: Array) -> Array:
            return _run_layer(
                definition, params, x, positions, rotation, None, partition=partition, remat="full"
            )[0]

        return jax.vjp(run, params, x)[1](grads)

    return gradients


def measure(
    layout: Layout, model: ModelConfig, ways: Sequence[str], programs: Sequence[str]
) -> dict[str, Any]:
    """These programs, compiled in these ways."""
    partition, whole = AutoPartition(layout), layout.sharding()

    def array(*shape: int, dtype: Any = jnp.bfloat16) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=whole)

    kv, group, dim = model.num_kv_heads, model.queries_per_kv, model.head_dim
    queries, context = array(1, LENGTH, kv, group, dim), array(1, LENGTH, kv, dim)
    positions = array(1, LENGTH, dtype=jnp.int32)
    x, angle = array(1, LENGTH, model.embed_dim), array(1, LENGTH, dim // 2, dtype=jnp.float32)
    made = nnx.eval_shape(lambda: Layer(model, keys=Keys(jax.random.key(0))))
    definition, params = nnx.split(made)
    params = jax.tree.map(lambda x: array(*x.shape, dtype=jnp.float32), params)
    known = {
        "attention": (
            attention_gradients(partition),
            (queries, context, context, positions, queries),
        ),
        "layer": (
            layer_gradients(partition, definition),
            (params, x, positions, (angle, angle), x),
        ),
    }
    chosen = {"kernel": row_attention.KERNELS[layout.platform], "all keys": all_keys}
    found = {}
    for way in ways:
        row_attention.KERNELS = {layout.platform: chosen[way]}
        jax.clear_caches()
        found[way] = {name: describe(*known[name]) for name in programs}
    return found


def looked_at(platform: str, lengths: Sequence[int], head_dim: int) -> dict[str, float]:
    """Share of the square of queries and keys in blocks that the forward kernel looks at, and of what
    is seen."""
    length = sum(lengths)
    if platform == "tpu":
        size, _ = row_attention_tpu._grid(length)
        tile = (size, size)
    else:
        of = row_attention_gpu._tiles(jnp.zeros((1, 1, 1, 1, head_dim), jnp.bfloat16)).forward
        tile = (of.queries, of.keys)
    positions = jnp.asarray(np.concatenate([np.arange(n, dtype=np.int32) for n in lengths])[None])
    start = np.asarray(key_blocks(seen_keys(positions), queries=tile[0], keys=tile[1]).own)[0]
    stop = -(-(np.arange(len(start)) + 1) * tile[0] // tile[1])
    seen = sum(n * (n + 1) // 2 for n in lengths)
    return {
        "blocks": round(float((stop - start).sum() * tile[0] * tile[1] / length**2), 4),
        "seen": round(seen / length**2, 4),
    }


def compiled_for(text: str, ways: Sequence[str], programs: Sequence[str]) -> dict[str, Any]:
    """What one target's compiler says; in a process of its own."""
    target, model = Target.parse(text), preset(MODEL)
    layout = make_layout(factored_mesh(devices_of(target)), 0, model)
    platform, dim = target.chip.platform, model.head_dim
    return measure(layout, model, ways, programs) | {
        "share of the square, one sequence": looked_at(platform, [LENGTH], dim),
        f"share of the square, sequences of {PACKED}": looked_at(
            platform, [PACKED] * (LENGTH // PACKED), dim
        ),
    }


def ask(
    target: str, *, ways: Sequence[str] = WAYS, programs: Sequence[str] = PROGRAMS
) -> dict[str, Any]:
    """`compiled_for` in a process with the environment that the target's compiler wants."""
    options = "--ways", *ways, "--programs", *programs
    return on_targets.ask("benchmarks.attention_temporaries", target, *options)


def table(found: Mapping[str, Any]) -> str:
    lines = ["| target | program | way | temporaries | products that XLA compiles |"]
    lines.append("|---|---|---|---|---|")
    for target, ways in found.items():
        for program in PROGRAMS:
            for way in reversed(WAYS):
                if said := ways.get(way, {}).get(program):
                    memory, products = said["temporaries_mib"], said["products_tflop"]
                    lines.append(
                        f"| {target} | {program} | {way} | {memory:,.0f} MiB | {products:.1f} TFLOP |"
                    )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    on_targets.add_target_options(parser, TARGETS)
    parser.add_argument("--ways", nargs="+", default=WAYS, choices=WAYS)
    parser.add_argument("--programs", nargs="+", default=PROGRAMS, choices=PROGRAMS)
    args = parser.parse_args()
    if args.child:
        print(json.dumps(compiled_for(args.child, args.ways, args.programs)))
        return
    found = on_targets.read_results(args.out)
    for target in args.targets:
        of = found.setdefault(target, {})
        for name, said in ask(target, ways=args.ways, programs=args.programs).items():
            of[name] = of.get(name, {}) | said
        on_targets.keep_results(args.out, found)
    print(table(found))


if __name__ == "__main__":
    main()
