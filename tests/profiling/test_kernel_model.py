"""Predicted kernels and whole steps: above the roofline, near what was measured."""

import re
from dataclasses import replace

import jax
import jax.numpy as jnp
import pytest
from fakes import SPLITS
from hypothesis import given
from hypothesis import strategies as st

from pat_jax.common.chips import chips
from pat_jax.layout.buckets import Buckets, Drafts
from pat_jax.models.config import ModelConfig
from pat_jax.models.layers import linear
from pat_jax.models.policy import Policy
from pat_jax.models.presets import preset
from pat_jax.models.weight_formats import WeightFormat, abstract_weight
from pat_jax.planning.types import Split
from pat_jax.profiling.predict.composer import Composer
from pat_jax.profiling.predict.kernel_model import EXPLAINED, ModelledKernels
from pat_jax.profiling.predict.links import added, links_of, waiting_s
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


DP8, DP4TP2, DP2TP4, TP8 = SPLITS


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


ALONE = Split(1, 1)
LLAMA, LARGE = preset("llama-3.1-8b"), preset("llama-3.1-70b")


def test_kv_heads_are_divided_as_the_layouts_divide_them():
    """The innermost two of six devices do not divide three heads: each has all."""
    model = replace(LLAMA, num_heads=12, num_kv_heads=3)
    kernels = ModelledKernels(Target.parse("h100:6"))
    split, ways = Split(1, 6), {6: 1}
    whole, parted = Composer(kernels, model, divided=ways), Composer(kernels, model)
    assert (whole.kv_ways(6), parted.kv_ways(6), whole.kv_ways(2)) == (1, 3, 1)
    assert whole.decode_step(split, 8, 8192) > parted.decode_step(split, 8, 8192)


def test_sums_are_two_a_layer_one_for_the_embedding_and_sampling_gathers():
    """The logits, or five numbers of each shard if shards have whole blocks of 128 tokens."""
    target = Target.parse("h100:8")
    composer = Composer(ModelledKernels(target), LLAMA)
    links, waiting = links_of(target), waiting_s(target.chip, 8)
    one, gather = links.all_reduce_s(8, 2 * 16 * 4096), links.all_gather_s(8, 4 * 16 * 128_256)
    assert composer.decode_links_s(16, Split(1, 8)) == pytest.approx(65 * (one + waiting) + gather)
    assert composer.decode_links_s(16, ALONE) == composer.prefill_links_s(ALONE) == 0.0
    padded = Composer(ModelledKernels(target), replace(LLAMA, vocab_multiple=1024))
    small = sum(links.all_gather_s(8, 4 * 16 * n) for n in (8, 32))
    assert padded.decode_links_s(16, Split(1, 8)) == pytest.approx(65 * (one + waiting) + small)
    assert (composer.sampled_logits(8), padded.sampled_logits(8)) == (128_256, 129_024 // 8)


@pytest.mark.parametrize("model", [LLAMA, preset("qwen3-0.6b")], ids=["own head", "tied"])
def test_eight_bits_are_counted_where_weights_are_kept_in_them(model: ModelConfig):
    """As the engine keeps them: layers quantized, embedding and head as they are."""
    leaves = jax.tree.leaves(Policy.from_config(model).with_weights("int8").abstract(jnp.bfloat16))
    kept = sum(leaf.size * leaf.dtype.itemsize for leaf in leaves)
    assert weight_bytes(model, 1) == pytest.approx(kept, rel=3e-3)  # scales
    assert weight_bytes(model, 4) == 2 * weight_bytes(model)


@given(sums=st.floats(0.0, 1e3), products=st.floats(1e-3, 1e3))
def test_tpus_sum_beside_products_and_gpus_behind_them(sums: float, products: float):
    gpu, tpu = (added(Target.parse(text).chip, sums, products) for text in ("h100:8", "v5e:2x4"))
    assert gpu == sums
    assert max(sums - products, 0.0) - 1e-9 <= tpu <= sums + 1e-9
    assert added(Target.parse("v5e:2x4").chip, 2 * sums, products) >= tpu


@pytest.mark.parametrize(
    ("narrow", "wide", "moved"), [(1, 8, 7 / 8), (4, 8, 1 / 8), (8, 16, 1 / 8)]
)
def test_replicated_kv_heads_are_sent_to_every_device_that_has_them(narrow, wide, moved):
    """Of the bytes of a round of a group; past 8 KV heads each device still holds one."""
    composer = Composer(ModelledKernels(Target.parse("v5e:4x4")), LARGE)
    up = Split(16 // narrow, narrow), Split(16 // wide, wide)
    whole = composer.round_tokens * LARGE.kv_bytes_per_token
    rate = composer.kernels.exchange_bytes_s(wide)
    assert composer.migrate(*up) == composer.migrate(*up[::-1])
    assert composer.migrate(*up) * rate / whole == pytest.approx(moved)


@pytest.mark.parametrize("text", ["h100:8", "v5e:2x4"])
def test_steps_read_what_rows_hold_where_the_engines_kernels_do(text: str):
    """Not where a shape does not fit the kernels: there rows are gathered whole."""
    buckets = Buckets.of((Split(8, 1),), 64, BucketLimits(8, 512, 4096))
    kernels = ModelledKernels(Target.parse(text))
    held, gathered = (
        Composer(kernels, replace(LLAMA, head_dim=dim)).latency_model(buckets) for dim in (128, 96)
    )
    assert (held.reads, gathered.reads) == ("held", "bucket")
    few, many = (held.decode_step(Split(8, 1), 8, 4096, 8 * n) for n in (600, 4096))
    assert few < many == pytest.approx(held.decode_table[Split(8, 1), 8, 4096])
    same = [gathered.decode_step(Split(8, 1), 8, 4096, 8 * n) for n in (600, 4096)]
    assert same[0] == same[1]


@pytest.mark.parametrize("text", ["h100:8", "v5e:2x4"])
def test_a_step_that_verifies_reads_weights_and_caches_once(text: str):
    """So it takes longer than a step of its rows, and less time than one of as many rows as tokens."""
    composer = Composer(ModelledKernels(Target.parse(text)), LLAMA)
    for split in (Split(8, 1), Split(1, 8)):
        for rows, num_draft_tokens in ((1, 7), (16, 3), (32, 7), (128, 1)):
            steps = [composer.decode_step(split, rows, 4096, n) for n in (0, num_draft_tokens)]
            assert steps[0] == composer.decode_step(split, rows, 4096)
            assert (
                steps[0]
                < steps[1]
                < composer.decode_step(split, rows * (1 + num_draft_tokens), 4096)
            )


class TestGeneratedDrafts:
    """A step that verifies them begins with a pass of the drafter for each token of the budget."""

    composer = Composer(ModelledKernels(Target.parse("h100:8")), LLAMA)
    small = Composer(composer.kernels, replace(LLAMA, num_layers=4, embed_dim=1024, mlp_dim=3072))
    splits = (Split(8, 1), Split(1, 8))
    buckets = Buckets.of(splits, 64, BucketLimits(1, 512, 1024))

    @pytest.mark.parametrize("split", splits, ids=str)
    def test_all_layers_that_exit_are_a_decode_step_and_the_head(self, split: Split):
        head = self.composer.kernels.gemm(4, LLAMA.embed_dim, LLAMA.embed_dim) / 1e3
        step = self.composer.decode_step(split, 4, 1024)
        assert self.composer.early_exit(split, 4, 1024, 32) == pytest.approx(step + head)
        few = [self.composer.early_exit(split, 4, 1024, layers) for layers in (8, 16, 24)]
        assert few[2] - few[1] == pytest.approx(few[1] - few[0])  # a quarter of the layers
        assert few[0] > 0.2 * step

    @pytest.mark.parametrize("num_draft_tokens", [1, 3])
    def test_a_draft_model_takes_as_long_in_every_layout(self, num_draft_tokens: int):
        """Whole on each device, two tokens of each row, one of them drawn."""
        drafts = Drafts(
            num_draft_tokens=(num_draft_tokens,), longest=7, most_tokens=256, has_model=True
        )
        model = self.composer.latency_model(self.buckets, drafts, self.small)
        at = (4, 1024)
        for split in self.splits:
            verified = self.composer.decode_step(split, *at, num_draft_tokens)
            output = (
                model.verify_table[split, *at, num_draft_tokens] - verified
            ) / num_draft_tokens
            assert output == pytest.approx(self.small.asked(*at))
        one, two = (self.small.decode_step(Split(1, 1), rows, 1024) for rows in (4, 8))
        assert one < self.small.asked(*at) < two
        assert model.drafts_from == "a model of 4 layers, 1024 and 3072 wide, 32 and 8 heads of 128"
