"""Kernels from coefficients and from tables: above the roofline, near what was measured, and honest about both."""

import re
from functools import cache
from itertools import product

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fakes import SPLITS
from hypothesis import given
from hypothesis import strategies as st
from published import DATA, needs_data

from pat_jax.common.chips import chips
from pat_jax.common.errors import UserError
from pat_jax.layout.buckets import Buckets
from pat_jax.models.layers import linear
from pat_jax.models.presets import preset
from pat_jax.models.weight_formats import WeightFormat, abstract_weight
from pat_jax.planning.types import Split
from pat_jax.profiling.predict.composer import Composer
from pat_jax.profiling.predict.kernel_files import MEASURED, Interpolated, KernelTables, NoData
from pat_jax.profiling.predict.kernel_model import ModelledKernels
from pat_jax.profiling.predict.links import Sums
from pat_jax.profiling.predict.model_sizes import weight_bytes
from pat_jax.profiling.predict.sources import EXPLAINED, kernels_for
from pat_jax.profiling.predict.targets import Target

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
    sources = {text: kernels_for(Target.parse(text)).source for text in TARGETS}
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


@needs_data
@pytest.mark.parametrize("name", MEASURED)
@pytest.mark.parametrize("model", ["llama-3.1-8b", "qwen3-14b"])
def test_steps_of_coefficients_are_near_those_of_the_tables(name: str, model: str):
    target = Target.parse(f"{name}:8")
    table, model_ = (Composer(kernels_for(target, data), preset(model)) for data in (DATA, None))
    errors = [
        model_.decode_step(split, rows, length) / table.decode_step(split, rows, length) - 1
        for split, rows, length in product(
            [Split(8, 1), Split(4, 2), Split(2, 4), Split(1, 8)], [1, 8, 64, 256], [256, 1024, 8192]
        )
    ]
    assert np.abs(errors).mean() < 0.09
    assert np.abs(errors).max() < 0.35


@needs_data
def test_where_tables_are_at_hand_they_are_taken():
    assert kernels_for(Target.parse("h200:8"), DATA).source == "tables"
    assert kernels_for(Target.parse("h200:8"), DATA, weight_bytes=1).source == "coefficients"
    assert kernels_for(Target.parse("b200:8"), DATA).source == "chip data"
    with pytest.raises(UserError, match=r"^target b200:8: there are kernel tables of a100, h100"):
        KernelTables(DATA, Target.parse("b200:8"))


@needs_data
def test_tables_go_on_where_they_end():
    """Hosts that no table has, heads that none has; sums as they were measured for each way."""
    kernels = KernelTables(DATA, Target.parse("h100:8x4"))
    assert kernels.all_reduce(16, 8192) > kernels.all_reduce(8, 8192)
    assert kernels.all_gather(32, 8192) > kernels.all_gather(8, 8192) > 0.0
    assert kernels.decode_attention(8, 1024, 12, 3) > 0.0
    assert kernels.prefill_attention(16, 1024, 12, 3) > 0.0
    ways: tuple[Sums, ...] = ("one-shot", "nccl", "ungraphed")
    by_sums = [
        KernelTables(DATA, Target.parse("h100:8"), sums).all_reduce(8, 4096) for sums in ways
    ]
    assert by_sums == sorted(by_sums) and by_sums[0] < 0.006 < 0.03 < by_sums[2]


DP8, DP4TP2, DP2TP4, TP8 = SPLITS
ON_TABLES = ("h100:8", "a100:8")


@cache
def measured_kernels(target: str) -> KernelTables:
    return KernelTables(DATA, Target.parse(target))


def test_a_line_goes_through_its_points_and_on_with_its_last_slope():
    line = Interpolated({1: 10.0, 2: 20.0, 4: 24.0})
    assert [line(size) for size in (1, 1.5, 2, 3, 4, 6)] == [10, 15, 20, 22, 24, 28]
    assert Interpolated({1: 5.0, 2: 4.0})(3) == 4.0  # noise is no downward slope
    assert Interpolated({3: 7.0})(100) == 7.0


def test_missing_data_is_said_in_one_sentence(tmp_path):
    with pytest.raises(NoData, match=r"no kernel tables in .*; name the folder .* with --data\.$"):
        KernelTables(tmp_path, Target.parse("h100:8"))


@needs_data
def test_a_step_of_llama_on_h100_is_near_the_published_one():
    """SGLang, August 2024, batch 1 and 128 input tokens: 7.37 ms at TP1, 3.35 ms at TP8."""
    composer = Composer(measured_kernels("h100:8"), preset("llama-3.1-8b"))
    assert composer.decode_step(DP8, 1, 128) == pytest.approx(7.37e-3, rel=0.25)
    assert composer.decode_step(TP8, 1, 128) == pytest.approx(3.35e-3, rel=0.5)


@needs_data
@pytest.mark.parametrize("target", ON_TABLES)
def test_a_latency_model_grows_and_crosses_over(target: str):
    buckets = Buckets.build(SPLITS, capacity=512, min_rows=1, min_length=512, max_length=4096)
    model = Composer(measured_kernels(target), preset("qwen3-14b")).latency_model(buckets)
    for split in SPLITS:
        for rows, more in zip(buckets.rows[split], buckets.rows[split][1:], strict=False):
            assert model.decode_step(split, rows, 512) <= model.decode_step(split, more, 512)
            assert model.decode_step(split, rows, 512) <= model.decode_step(split, rows, 4096)
    one, full = ([model.decode_step(s, -(-n // s.dp), 1024) for s in SPLITS] for n in (1, 512))
    assert one == sorted(one, reverse=True)  # few sequences: TP8 is the fastest
    assert min(full) < full[-1]  # a full batch: it is not
    # Upward, weights are read and written once, on the device.
    composer = Composer(measured_kernels(target), preset("qwen3-14b"), switch_s=0.0)
    shard = weight_bytes(preset("qwen3-14b")) / 8
    assert composer.reshard(DP8, TP8) == 2 * shard / composer.kernels.chip.memory_bytes_s
    assert composer.migrate(DP8, TP8) == pytest.approx(
        composer.round_tokens * 160 * 1024 * 7 / 8 / composer.kernels.chip.link_bytes_s
    )
