"""What a layer keeps for its backward pass by policy of rematerialization, on a device that is not there.

    python -m benchmarks.layer_residuals --out benchmarks/results/layer_residuals.json

Needs the extra `plan` and no accelerator. One row of 16,384 tokens of Llama-3.1-8B in bfloat16 on one
device, forward and backward through two layers and through three: what the third takes more is what
each keeps, and what it computes. Products are those that XLA compiles, from the program's text;
attention's kernels are counted there.
"""

import argparse
import json
from collections.abc import Mapping, Sequence
from itertools import product
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from benchmarks import on_targets
from pat_jax.engine.layout.layout import AutoPartition, Layout, factored_mesh, make_layout
from pat_jax.models.config import ModelConfig
from pat_jax.models.layers import Rotation
from pat_jax.models.parameters import Keys
from pat_jax.models.presets import preset
from pat_jax.models.rematerialization import NONE, POLICIES
from pat_jax.models.transformer import Layer, _run_layer
from pat_jax.profiling.cross_compile import hlo_costs
from pat_jax.profiling.cross_compile.worker import devices_of
from pat_jax.profiling.predict.targets import Target

TARGETS = ("v5e:1x1", "h100:1")
MODEL, LENGTH, DEPTHS = "llama-3.1-8b", 16_384, (2, 3)
REMATS = (*POLICIES, NONE)
KERNELS = ('custom_call_target="tpu_custom_call"', 'custom_call_target="__gpu$xla.gpu.triton"')


def describe(layout: Layout, model: ModelConfig, remat: str, depth: int) -> dict[str, float]:
    """Forward and backward through so many layers."""
    partition, whole = AutoPartition(layout), layout.sharding()

    def array(*shape: int, dtype: Any = jnp.bfloat16) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=whole)

    made = nnx.eval_shape(lambda: Layer(model, keys=Keys(jax.random.key(0))))
    definition, params = nnx.split(made)
    params = jax.tree.map(lambda x: array(*x.shape, dtype=jnp.float32), params)
    x = array(1, LENGTH, model.embed_dim)
    positions = array(1, LENGTH, dtype=jnp.int32)
    angle = array(1, LENGTH, model.head_dim // 2, dtype=jnp.float32)

    def gradients(
        sums: Any, layers: Sequence[Any], x: Any, positions: Any, angles: Any, grads: Any
    ) -> Any:
        def run(layers: Sequence[Any], x: Any) -> Any:
            for params in layers:
                x, _ = _run_layer(
                    definition,
                    params,
                    x,
                    positions,
                    Rotation(*angles),
                    None,
                    partition=partition,
                    remat=remat,
                )
            return x

        return jax.tree.map(jnp.add, sums, jax.vjp(run, layers, x)[1](grads))

    layers = [params] * depth
    args = (layers, x), layers, x, positions, (angle, angle), x
    # What is kept would else lie where results will: those of a run are given up as well.
    compiled = jax.jit(gradients, donate_argnums=0).lower(*args).compile()
    memory, text = compiled.memory_analysis(), compiled.as_text() or ""
    assert memory is not None  # both compilers report it
    return {
        "temporaries_mib": memory.temp_size_in_bytes / 2**20,
        "products_tflop": hlo_costs.count(text).flops / 1e12,
        "kernels": sum(text.count(kernel) for kernel in KERNELS),
    }


def compiled_for(text: str, remats: Sequence[str]) -> dict[str, Any]:
    """What one target's compiler says of a layer; in a process of its own."""
    target, model = Target.parse(text), preset(MODEL)
    layout = make_layout(factored_mesh(devices_of(target)), 0, model)
    found = {}
    for remat in remats:
        few, more = (describe(layout, model, remat, depth) for depth in DEPTHS)
        found[remat] = {"two layers": few} | {
            "each further": {name: round(more[name] - few[name], 3) for name in few}
        }
    return found


def ask(target: str, *, remats: Sequence[str] = REMATS) -> dict[str, Any]:
    """`compiled_for` in a process with the environment that the target's compiler wants."""
    return on_targets.ask("benchmarks.layer_residuals", target, "--remats", *remats)


def table(found: Mapping[str, Any]) -> str:
    lines = [
        "| target | `--remat` | temporaries of three layers | of them the third's | its products | its "
        "kernels of attention |"
    ]
    lines.append("|---|---|---|---|---|---|")
    for target, remats in found.items():
        for remat, said in remats.items():
            each, name = said["each further"], "temporaries_mib"
            lines.append(
                f"| {target} | {remat} | {said['two layers'][name] + each[name]:,.0f} MiB "
                f"| {each[name]:,.0f} MiB "
                f"| {each['products_tflop']:.1f} TFLOP | {each['kernels']:.0f} |"
            )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    on_targets.add_target_options(parser, TARGETS)
    parser.add_argument("--remats", nargs="+", default=REMATS, choices=REMATS)
    args = parser.parse_args()
    if args.child:
        print(json.dumps(compiled_for(args.child, args.remats)))
        return
    found = on_targets.read_results(args.out)
    for target, remat in product(args.targets, args.remats):
        found.setdefault(target, {}).update(ask(target, remats=[remat]))
        on_targets.keep_results(args.out, found)
    print(table(found))


if __name__ == "__main__":
    main()
