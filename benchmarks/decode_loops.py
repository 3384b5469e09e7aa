"""The layers of a decode step one after the other and as a loop, compiled for devices that are not there.

    python -m benchmarks.decode_loops --out benchmarks/results/decode_loops.json

Needs the extra `plan` and no accelerator. The loop reads its weights from one array for all layers, and
its pages from one pool for all layers. 64 rows of 8,192 tokens of Llama-3.1-8B in bfloat16, dp1tp8;
without embedding, head and sampling. Bytes are those of one step, from the compiled program's text.
"""

import argparse
import json
import time
from collections.abc import Mapping, Sequence
from functools import partial
from itertools import product
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from benchmarks import on_targets
from pat_jax.engine.layout.layout import Layout, ManualPartition, factored_mesh, make_layout
from pat_jax.models.config import ModelConfig
from pat_jax.models.kernel_choice import Kernels
from pat_jax.models.kv_cache import KV_AXES
from pat_jax.models.layers import Rotation, angles, rope_frequencies
from pat_jax.models.paged_layer import KERNELS, PagedLayer, _write_at_once
from pat_jax.models.parameters import Keys
from pat_jax.models.presets import preset
from pat_jax.models.transformer import Layer
from pat_jax.profiling.cross_compile import hlo_costs
from pat_jax.profiling.cross_compile.worker import devices_of
from pat_jax.profiling.predict.targets import Target

TARGETS, FORMS, DEPTHS = ("h100:8", "v5e:2x4"), ("unrolled", "loop"), (8, 32)
MODEL, ROWS, LENGTH, PAGE_SIZE, STEPS = "llama-3.1-8b", 64, 8_192, 16, 16


class LayerOfPool(NamedTuple):
    """One layer's pages of a pool that has those of all layers, the first of them at `first`."""

    keys: Float[Array, "all_pages kv_heads page_size head_dim"]
    values: Float[Array, "all_pages kv_heads page_size head_dim"]
    table: Int[Array, "rows width"]  # among the pages of its layer
    first: Int[Array, ""]

    def attend(
        self, queries: Array, keys: Array, values: Array, positions: Array, kernels: Kernels
    ) -> tuple[Array, "LayerOfPool"]:
        """Of one token a row, none of which has ended."""
        place = positions[:, 0] % PAGE_SIZE
        page = jnp.take_along_axis(self.table, positions // PAGE_SIZE, axis=1)[:, 0] + self.first

        def put(pool: Array, new: Array) -> Array:
            return _write_at_once(pool, jnp.swapaxes(new, 1, 2), page, place)

        written = self._replace(keys=put(self.keys, keys), values=put(self.values, values))
        pools = written.keys, written.values
        decode = KERNELS[kernels.platform].decode
        out = decode(queries[:, 0], *pools, self.table + self.first, positions[:, 0] + 1)
        return out[:, None], written


def unrolled(run: Any, layers: Sequence[Any], pool: Sequence[Any], table: Any, x: Any) -> Any:
    written = []
    for params, pages in zip(layers, pool, strict=True):
        x, cache = run(params, x, cache=PagedLayer(pages[0], pages[1], table))
        written.append((cache.keys, cache.values))
    return x, written


def loop(run: Any, stacked: Any, pool: Any, table: Any, x: Any) -> Any:
    count = len(jax.tree.leaves(stacked)[0])
    pages = len(pool[0]) // count

    def one(i: Any, carry: Any) -> Any:
        x, pool = carry
        params = jax.tree.map(
            partial(jax.lax.dynamic_index_in_dim, index=i, keepdims=False), stacked
        )
        x, cache = run(params, x, cache=LayerOfPool(pool[0], pool[1], table, i * pages))
        return x, (cache.keys, cache.values)

    return jax.lax.fori_loop(0, count, one, (x, pool))


def describe(layout: Layout, model: ModelConfig, form: str, depth: int) -> dict[str, float]:
    """Of `STEPS` steps through so many layers."""
    made = nnx.eval_shape(lambda: Layer(model, keys=Keys(jax.random.key(0))))
    definition, variables = nnx.split(made)
    stack = () if form == "unrolled" else (depth,)

    def weight(variable: Any) -> jax.ShapeDtypeStruct:
        names = [None] * len(stack) + list(variable.get_metadata()["axes"])
        return array(*stack, *variable.get_value().shape, names=names)

    def array(*shape: int, names: Sequence[Any] = (), dtype: Any = jnp.bfloat16) -> Any:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=layout.sharding(*names))

    is_variable = {"is_leaf": lambda x: isinstance(x, nnx.Variable)}
    params = jax.tree.map(lambda x: x.replace(weight(x)), variables, **is_variable)
    width = LENGTH // PAGE_SIZE
    pages = (ROWS * width + 1) * (depth if stack else 1), model.num_kv_heads, PAGE_SIZE
    pool: Any = (array(*pages, model.head_dim, names=KV_AXES),) * 2
    if not stack:
        params, pool = [params] * depth, [pool] * depth
    x, table = array(ROWS, 1, model.embed_dim), array(ROWS, width, dtype=jnp.int32)
    positions = array(ROWS, 1, dtype=jnp.int32)

    def steps(params: Any, pool: Any, x: Any, table: Any, positions: Any) -> Any:
        def step(_: Any, carry: Any) -> Any:
            x, pool, positions = carry
            rotation: Rotation = angles(positions, rope_frequencies(model))

            def run(params: Any, x: Any, cache: Any) -> Any:
                layer = nnx.merge(definition, params)
                return layer(x, positions, rotation, cache, ManualPartition(layout))

            x, pool = (loop if stack else unrolled)(run, params, pool, table, x)
            return x, pool, positions + 1

        return jax.lax.fori_loop(0, STEPS, step, (x, pool, positions))

    args = params, pool, x, table, positions
    specs = jax.tree.map(lambda x: x.sharding.spec, args)
    mapped = jax.shard_map(
        steps, mesh=layout.mesh, in_specs=specs, out_specs=(specs[2], specs[1], specs[4]), check_vma=False
    )  # fmt: skip
    lowered = jax.jit(mapped, donate_argnums=1).lower(*args)
    start = time.process_time()
    compiled = lowered.compile()
    seconds = time.process_time() - start
    counted = hlo_costs.count(compiled.as_text() or "", inside=1)
    memory = compiled.memory_analysis()
    assert memory is not None  # both compilers report it
    return {
        "compile_s": round(seconds, 1),
        "moved_mb": round(counted.num_bytes / 1e6),
        "moved_by_products_mb": round(counted.product_bytes / 1e6),
        "temporaries_mib": round(memory.temp_size_in_bytes / 2**20),
    }


def ask(target: str, form: str, depth: int) -> dict[str, float]:
    """`describe` in a process with the environment that the target's compiler wants."""
    options = "--forms", form, "--depths", str(depth)
    return on_targets.ask("benchmarks.decode_loops", target, *options)


def table(found: Mapping[str, Any]) -> str:
    lines = [
        "| target | layers | | compiled | bytes of a step | of them by products | temporaries |",
        "|---|---|---|---|---|---|---|",
    ]
    for target, forms in found.items():
        depths = sorted({depth for depths in forms.values() for depth in depths}, key=int)
        for depth, form in product(depths, FORMS):
            if said := forms.get(form, {}).get(depth):
                lines.append(
                    f"| {target} | {depth} | {form} | {said['compile_s']:.0f} s "
                    f"| {said['moved_mb']:,} MB | {said['moved_by_products_mb']:,} MB "
                    f"| {said['temporaries_mib']:,} MiB |"
                )
    return "\n".join(lines)


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    on_targets.add_target_options(parser, TARGETS)
    parser.add_argument("--forms", nargs="+", default=list(FORMS), choices=FORMS)
    parser.add_argument("--depths", nargs="+", type=int, default=DEPTHS, help="layers")
    args = parser.parse_args(words)
    if args.child:
        jax.config.update("jax_enable_compilation_cache", False)
        model, devices = preset(MODEL), devices_of(Target.parse(args.child))
        mesh = factored_mesh(devices)
        layout = make_layout(mesh, len(mesh.axis_names), model)
        print(json.dumps(describe(layout, model, *args.forms, *args.depths)))
        return
    found = on_targets.read_results(args.out)
    for target, depth, form in product(args.targets, args.depths, args.forms):
        of = found.setdefault(target, {}).setdefault(form, {})
        of[str(depth)] = ask(target, form, depth)
        on_targets.keep_results(args.out, found)
    print(table(found))


if __name__ == "__main__":
    main()
