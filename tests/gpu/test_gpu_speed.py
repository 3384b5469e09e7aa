"""What steps take. Nothing here is held against a limit: the figures are written down."""

import time
from dataclasses import replace

import jax
import jax.numpy as jnp
import pytest
from one_device import PLATFORM, device, kernels, note

from pat_jax.engine.warm_up.warm_up import Warmup
from pat_jax.models.kernels.expert_mlp import mlp_by_expert
from pat_jax.models.kernels.grouped import tile_size
from pat_jax.models.kernels.kernel_choice import Kernels
from pat_jax.models.presets import preset
from tests.lossless import Settings, Subject

pytestmark = pytest.mark.gpu
SHAPE = "qwen3-0.6b" if PLATFORM == "gpu" else "demo"
MODEL = replace(preset(SHAPE), num_layers=2, vocab_size=4096)
ROWS, TOKENS = (64, 1024) if PLATFORM == "gpu" else (4, 128)
SETTINGS = Settings(
    sequences=ROWS,
    max_prompt_length=64,
    max_completion_length=TOKENS - 64,
    min_rows=ROWS,
    min_length=TOKENS,
    page_size=16,
    prefill_blocks=ROWS,
)


@pytest.mark.parametrize("way", ["kernels", "plain operations"])
def test_seconds_of_decoding_and_prefill(way: str):
    wanted = kernels() if way == "kernels" and PLATFORM == "gpu" else Kernels(device().platform)
    one = Subject(MODEL, SETTINGS, jnp.dtype(jnp.bfloat16), 1, wanted)
    latency = Warmup(one.engine).measure(one.weights)
    figures = {
        f"{name} {key[0]} {' '.join(map(str, key[1:]))}": seconds
        for name, table in (("decode", latency.decode_table), ("prefill", latency.prefill_table))
        for key, seconds in table.items()
    }
    assert figures and all(seconds > 0 for seconds in figures.values())
    note(f"seconds of {SHAPE} in two layers, {way}", figures)


@pytest.mark.parametrize("way", ["kernels", "plain operations"])
@pytest.mark.parametrize("rows", [1, 64, 512] if PLATFORM == "gpu" else [3])
def test_seconds_of_a_layer_of_experts(rows: int, way: str):
    """Of Qwen3-30B-A3B: 8 of 128 experts of 2048 x 768, and the bandwidth by the weights read."""
    embed, dim, count, k = (2048, 768, 128, 8) if PLATFORM == "gpu" else (32, 16, 4, 2)
    used = kernels() if way == "kernels" else Kernels(device().platform)
    keys, bf16 = jax.random.split(jax.random.key(0), 5), jnp.bfloat16
    shapes = (count, dim, embed), (count, dim, embed), (count, embed, dim)
    stacks = [jax.random.normal(*each, bf16) / 32 for each in zip(keys, shapes, strict=False)]
    x = jax.random.normal(keys[3], (rows, embed), bf16)
    chosen = jax.lax.top_k(jax.random.uniform(keys[4], (rows, count)), k)[1]
    shares, size = jnp.full((rows, k), 1 / k), tile_size(rows, k, count)
    compute = jax.jit(lambda x, *w: mlp_by_expert(w, x, chosen, shares, size, used))
    jax.block_until_ready(compute(x, *stacks))
    start = time.perf_counter()
    jax.block_until_ready([compute(x, *stacks) for _ in range(10)])
    seconds = (time.perf_counter() - start) / 10
    read = len(jnp.unique(chosen)) * 3 * 2 * embed * dim
    note(f"experts of {rows} rows, {way}", {"seconds": seconds, "gb_s": read / seconds / 1e9})
    assert seconds > 0


def test_seconds_of_a_product():
    """Of bfloat16 matrices, by which a device that is throttled is known."""
    size = 8192 if PLATFORM == "gpu" else 256
    x = jnp.ones((size, size), jnp.bfloat16)
    multiply = jax.jit(lambda x: x @ x)
    jax.block_until_ready(multiply(x))
    start = time.perf_counter()
    jax.block_until_ready([multiply(x) for _ in range(10)])
    seconds = (time.perf_counter() - start) / 10
    note("product", {"seconds": seconds, "tflops": 2 * size**3 / seconds / 1e12})
    assert seconds > 0
