"""What steps take. Nothing here is held against a limit: the figures are written down."""

import time
from dataclasses import replace

import jax
import jax.numpy as jnp
import pytest
from one_device import PLATFORM, device, kernels, note

from pat_jax.engine.warm_up.warm_up import Warmup
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
