"""Kernels from coefficients and from tables: above the roofline, near what was measured, and honest about both."""

import re

import jax
import jax.numpy as jnp
import pytest
from fakes import SPLITS
from hypothesis import given
from hypothesis import strategies as st

from pat_jax.common.chips import chips
from pat_jax.layout.buckets import Buckets
from pat_jax.models.layers import linear
from pat_jax.models.presets import preset
from pat_jax.models.weight_formats import WeightFormat, abstract_weight
from pat_jax.profiling.predict.composer import Composer
from pat_jax.profiling.predict.kernel_model import EXPLAINED, ModelledKernels
from pat_jax.profiling.predict.model_sizes import weight_bytes
from pat_jax.profiling.predict.targets import Target
from tests.bucket_limits import BucketLimits

EXAMPLES = {"v5e": "v5e:2x4", "v5p": "v5p:2x2x2", "v6e": "v6e:2x4"}
TARGETS = [EXAMPLES.get(name, f"{name}:8") for name in chips()]
size = st.integers(1, 16_384)


@given(text=st.sampled_from(TARGETS), m=size, n=size, k=size)
def test_no_product_beats_the_memory_or_the_arithmetic(text: str, m: int, n: int, k: int):
    kernels = ModelledKernels(Target.parse(text))
    seconds = kernels.gemm(m, n, k) / 1e3
    assert seconds >= 2 * (m * k + k * n + m * n) / kernels.chip.memory_bytes_s
    assert seconds >= 2 * m * n * k / kernels.chip.flops_s


@given(
    text=st.sampled_from(TARGETS),
    rows=st.integers(1, 512),
    length=st.integers(1, 32_768),
    kv_heads=st.sampled_from([1, 2, 4, 8]),
)
def test_no_attention_beats_the_memory(text: str, rows: int, length: int, kv_heads: int):
    kernels = ModelledKernels(Target.parse(text))
    seconds = kernels.decode_attention(rows, length, 4 * kv_heads, kv_heads) / 1e3
    assert seconds >= 2 * 2 * 128 * rows * length * kv_heads / kernels.chip.memory_bytes_s
    assert kernels.decode_attention(2 * rows, length, 4 * kv_heads, kv_heads) / 1e3 > seconds


def test_every_known_chip_has_coefficients_and_says_whose():
    sources = {text: ModelledKernels(Target.parse(text)).source for text in TARGETS}
    assert sources["h100:8"] == sources["v6e:2x4"] == "coefficients"
    assert sources["b200:8"] == sources["a40:8"] == sources["v5e:2x4"] == "chip data"
    assert set(sources.values()) <= EXPLAINED.keys()


@pytest.mark.parametrize("weights", ["int8", "fp8"])
def test_products_of_eight_bit_weights_are_of_bfloat16_numbers_and_priced_so(weights: WeightFormat):
    """The weights alone are quantized: a prefill is not computed at the rate of eight bits."""
    kept = abstract_weight((256, 128), 1, weights)
    x = jax.ShapeDtypeStruct((4096, 128), jnp.bfloat16)
    program = jax.jit(linear).trace(x, kept).lower(lowering_platforms=("cuda",)).as_text()
    (product,) = re.findall(r"stablehlo.dot_general .*: \((.*)\) ->", program)
    assert product == "tensor<4096x128xbf16>, tensor<256x128xbf16>"
    target, sizes = Target.parse("h100:8"), (16_384, 8192, 8192)
    wide, narrow = (ModelledKernels(target, size).gemm(*sizes) for size in (2, 1))
    assert narrow == pytest.approx(wide, rel=0.01)


@pytest.mark.parametrize("text", ["h100:8", "v5e:2x4"])
def test_the_head_is_read_in_bfloat16_whatever_the_layers_are_kept_in(text: str):
    target, sizes = Target.parse(text), (1, 128_256, 4096)
    wide, *others = (ModelledKernels(target, size) for size in (2, 1, 4))
    assert others[0].head(*sizes) == wide.head(*sizes) == wide.gemm(*sizes)
    assert others[0].gemm(*sizes) < 0.6 * wide.gemm(*sizes)
    assert others[1].head(*sizes) == others[1].gemm(*sizes)  # float32, as everything is then


DP8, *_, TP8 = SPLITS


@pytest.mark.parametrize("text", ["h100:8", "a100:8"])
def test_a_latency_model_grows_and_crosses_over(text: str):
    kernels = ModelledKernels(Target.parse(text))
    buckets = Buckets.of(SPLITS, 512, BucketLimits(1, 512, 4096))
    model = Composer(kernels, preset("qwen3-14b")).latency_model(buckets)
    for split in SPLITS:
        for rows, more in zip(buckets.rows[split], buckets.rows[split][1:], strict=False):
            assert model.decode_step(split, rows, 512) <= model.decode_step(split, more, 512)
            assert model.decode_step(split, rows, 512) <= model.decode_step(split, rows, 4096)
    one, full = ([model.decode_step(s, -(-n // s.dp), 1024) for s in SPLITS] for n in (1, 512))
    assert one == sorted(one, reverse=True)  # few sequences: TP8 is the fastest
    assert min(full) < full[-1]  # a full batch: it is not
    # Upward, weights are read and written once, on the device.
    composer = Composer(kernels, preset("qwen3-14b"), switch_s=0.0)
    shard = weight_bytes(preset("qwen3-14b")) / 8
    assert composer.reshard(DP8, TP8) == 2 * shard / composer.kernels.chip.memory_bytes_s
    assert composer.migrate(DP8, TP8) == pytest.approx(
        composer.round_tokens * 160 * 1024 * 7 / 8 / composer.kernels.chip.link_bytes_s
    )
