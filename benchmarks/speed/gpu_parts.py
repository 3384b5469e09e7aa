"""Kernels and programs of one GPU by themselves: a line of JSON for each figure, written at once.

    python -m benchmarks.speed.gpu_parts loss --out loss.jsonl
    python -m benchmarks.speed.gpu_parts attention --small --out attention.jsonl   # on a CPU

    loss       log-probabilities of 8,192 tokens and their gradients, by the tokens of a chunk
    attention  the engine's paged attention and cuDNN's, by rows and contexts; attention of an update
    compile    seconds to compile the gradients of four layers, by the options of the compiler

What fails gives a line with its error, and the next figure is measured.
"""

import argparse
import json
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pat_jax.config.compute import Compute
from pat_jax.layout.chain import layout_chain
from pat_jax.layout.mesh import factored_mesh
from pat_jax.models.config import ModelConfig
from pat_jax.models.kernels.paged_prefill import attend_blocks_on_gpu
from pat_jax.models.kernels.row_attention_gpu import attend_on_gpu as attend_in_rows
from pat_jax.models.policy import Policy
from pat_jax.models.presets import preset
from pat_jax.rl.algorithm.predict import Predictor
from pat_jax.training.build import functions_of

DTYPE = jnp.bfloat16
PAGE, HEADS, DIM = 16, 8, 128
CALLS = 24  # of the kernel in one program
Figures = Iterator[tuple[dict[str, Any], Callable[[], dict[str, float]]]]


def seconds(run: Callable[..., Any], *args: Any) -> float:
    """The least of five runs, after two."""
    taken = []
    for _ in range(7):
        start = time.perf_counter()
        jax.block_until_ready(run(*args))
        taken.append(time.perf_counter() - start)
    return min(taken[2:])


def normal(seed: int, *shape: int, dtype: Any = DTYPE) -> jax.Array:
    return jax.random.normal(jax.random.key(seed), shape, dtype)


def losses(is_small: bool) -> Figures:
    tokens = 64 if is_small else 8192

    def measured(config: ModelConfig, chunk: int) -> dict[str, float]:
        policy = Policy.from_config(config)
        layouts, _ = layout_chain(factored_mesh(jax.devices()[:1]), config)
        functions = functions_of(Compute("bfloat16"), policy, next(iter(layouts.values())))
        texts = jax.random.randint(jax.random.key(2), (1, tokens), 0, config.vocab_size)

        def total(hidden: jax.Array, params: Any) -> jax.Array:
            """Without the layers."""
            model = replace(functions, forward=lambda *_: (hidden, {}))
            predictor = Predictor(model, config.vocab_size, logit_tokens=chunk)
            return jnp.sum(predictor.score_step(params, texts))

        hidden = normal(0, 1, tokens, config.embed_dim)
        taken = seconds(jax.jit(jax.grad(total, argnums=(0, 1))), hidden, policy.init(0))
        flops = 8 * tokens * config.vocab_size * config.embed_dim
        return {"ms": 1e3 * taken, "tflops": flops / taken / 1e12}

    for name in ("tiny",) if is_small else ("qwen3-0.6b", "qwen3-8b"):
        config = replace(preset(name), num_layers=1)
        for chunk in (16, 64) if is_small else (432, 2048, 4096):
            yield {"model": name, "chunk": chunk}, partial(measured, config, chunk)


def cudnn(queries: Any, keys: Any, values: Any, table: Any, lengths: Any) -> jax.Array:
    """cuDNN's paged attention, by a private function of JAX, which may be gone."""
    from jax._src.cudnn import fused_attention_stablehlo as fused

    rows, heads, group, dim = queries.shape
    none = jnp.zeros(0, queries.dtype)
    pages = table[:, None, :, None]
    out: Any = fused._dot_product_attention(
        queries.reshape(rows, heads * group, 1, dim),
        keys,
        values,
        none,  # bias
        jnp.ones(rows, jnp.int32),
        lengths,
        none,  # offsets of packed queries
        none,  # offsets of packed keys
        pages,
        pages,
        dim**-0.5,
        0,  # seed
        0.0,  # dropout
        (False, False),
        fused.MaskType.PADDING,
        fused.AttentionLayout.BNTH.value,
        None,
        fused.check_cudnn_version(),
        False,
    )
    return (out[0] if isinstance(out, (tuple, list)) else out).reshape(queries.shape)


def attention(is_small: bool) -> Figures:
    heads, dim = (1, 16) if is_small else (HEADS, DIM)

    def ours(queries: Any, keys: Any, values: Any, table: Any, lengths: Any) -> jax.Array:
        attend = partial(attend_blocks_on_gpu, interpret=is_small)
        return attend(queries[:, None], keys, values, table, lengths - 1)[:, 0]

    def paged(attend: Callable[..., jax.Array], rows: int, context: int, group: int):
        width = context // PAGE
        order = np.random.default_rng(0).permutation(rows * width).astype(np.int32)
        table = jnp.asarray(order.reshape(rows, width))
        pool = normal(0, rows * width, heads, PAGE, dim)
        lengths = jnp.full(rows, context, jnp.int32)

        def many(queries: Any, keys: Any, values: Any) -> jax.Array:
            """Each call has the queries that the one before gave, and other rows' pages."""

            def call(i: Any, queries: jax.Array) -> jax.Array:
                out = attend(queries, keys, values, jnp.roll(table, i, 0), lengths)
                return out.astype(queries.dtype)

            return jax.lax.fori_loop(0, calls, call, queries)

        calls = 1 if is_small else CALLS
        queries = normal(1, rows, heads, group, dim)
        taken = seconds(jax.jit(many), queries, pool, pool + 0) / calls
        return {"us": 1e6 * taken, "tb_s": 2 * pool.nbytes / taken / 1e12}

    def in_rows(tokens: int, sequences: int, group: int) -> dict[str, float]:
        length = tokens // sequences
        positions = jnp.tile(jnp.arange(length), sequences)[None]
        queries, given = (normal(i, 1, tokens, heads, group, dim) for i in (0, 1))
        keys = normal(2, 1, heads, tokens, dim)

        def backward(queries: Any, keys: Any, values: Any) -> Any:
            def attend(queries: Any, keys: Any, values: Any) -> jax.Array:
                return attend_in_rows(queries, keys, values, positions, interpret=is_small)

            return jax.vjp(attend, queries, keys, values)[1](given)

        taken = seconds(jax.jit(backward), queries, keys, keys)
        flops = 6 * 2 * heads * group * dim * sequences * length**2 / 2
        return {"us": 1e6 * taken, "model_tflops": flops / taken / 1e12}

    cells = [
        (64, 1024, 4),
        (256, 1024, 4),
        (8, 8192, 4),
        (1, 8192, 4),
        (1, 1024, 4),
        (256, 1024, 2),
    ]
    for cell in [(2, 64, 2)] if is_small else cells:
        about = dict(zip(("rows", "context", "group"), cell, strict=True))
        for name, attend in (("ours", ours), ("cudnn", cudnn)):
            yield {"kernel": name, **about}, partial(paged, attend, *cell)
    for tokens, sequences in [(128, 4)] if is_small else [(4096, 1), (16_384, 8)]:
        about = {"tokens": tokens, "sequences": sequences}
        yield {"kernel": "update", **about}, partial(in_rows, tokens, sequences, 2)


OPTIONS: dict[str, dict[str, Any]] = {
    "default": {},
    "without the fusion autotuner": {"xla_gpu_experimental_enable_fusion_autotuner": False},
    "without autotuning": {"xla_gpu_autotune_level": 0},
}


def compiling(is_small: bool) -> Figures:
    jax.config.update("jax_enable_compilation_cache", False)
    shape = "tiny" if is_small else "qwen3-0.6b"
    policy = Policy.from_config(replace(preset(shape), num_layers=4, vocab_size=8192))
    tokens = jax.ShapeDtypeStruct((1, 64 if is_small else 4096), jnp.int32)

    def measured(is_loop: bool, name: str) -> dict[str, float]:
        def loss(params: Any, tokens: Any) -> jax.Array:
            model = policy.bind(params)
            hidden, *_ = model(tokens, tokens, dtype=dtype, scan_layers=is_loop)
            return hidden.astype(jnp.float32).sum()

        lowered = jax.jit(jax.grad(loss)).lower(policy.abstract(jnp.dtype(jnp.float32)), tokens)
        start = time.perf_counter()
        lowered.compile(compiler_options=OPTIONS[name])
        return {"s": time.perf_counter() - start}

    dtype = jnp.float32 if is_small else DTYPE  # a CPU runs no bfloat16 products in a loop
    for name in ("default",) if is_small else OPTIONS:
        for is_loop in (True, False):
            yield {"options": name, "loop": is_loop}, partial(measured, is_loop, name)


PARTS = {"loss": losses, "attention": attention, "compile": compiling}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("part", choices=PARTS)
    parser.add_argument("--out", type=Path, required=True, help="file of lines of JSON")
    parser.add_argument("--small", action="store_true", help="tiny shapes, on a CPU")
    args = parser.parse_args()
    with args.out.open("w", buffering=1) as lines:
        for about, measure in PARTS[args.part](args.small):
            try:
                found: dict[str, Any] = measure()
            except Exception as error:  # whatever a library raises: the next figure is another's
                found = {"error": " ".join(f"{type(error).__name__}: {error}".split())[:300]}
            print(line := json.dumps({**about, **found}), flush=True)
            lines.write(line + "\n")


if __name__ == "__main__":
    main()
