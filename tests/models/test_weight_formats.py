"""Quantized weights: the bound on their error, which of them there are, and the model made of them."""

import functools
import math
from dataclasses import replace
from itertools import product

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from arrays import assert_same_bits
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from pat_jax.models.checkpoints.hf_export import export
from pat_jax.models.checkpoints.hf_load import load_params
from pat_jax.models.kernels.grouped import by_expert
from pat_jax.models.layers import BLOCK, linear
from pat_jax.models.policy import Params, Policy
from pat_jax.models.presets import preset
from pat_jax.models.weight_formats import (
    QuantizedWeight,
    WeightFormat,
    abstract_weight,
    is_quantized,
    quantize,
)
from tests.lossless import MODELS, lively_params

FORMATS = ("int8", "fp8")
LARGEST = {"int8": 127, "fp8": 448}
VOCAB = 64  # none of it is padding
CONFIGS = {
    "qwen3": replace(MODELS["kv8"], num_layers=1, vocab_size=VOCAB, tie_embeddings=True),
    "qwen2": replace(MODELS["kv2"], num_layers=1, vocab_size=VOCAB),
    "qwen3_moe": replace(preset("tiny-moe", VOCAB), num_layers=2),  # of experts, and without
}


@functools.cache
def policy_and_params(name: str) -> tuple[Policy, Params]:
    policy = Policy.from_config(CONFIGS[name])
    return policy, jax.tree.map(jnp.asarray, lively_params(policy))


def quantized(weight: np.ndarray, contracted: int, weights: WeightFormat) -> QuantizedWeight:
    like = abstract_weight(weight.shape, contracted, weights)
    assert isinstance(like, QuantizedWeight)
    return quantize(jnp.asarray(weight), like)


def half_step(weight: np.ndarray, contracted: int, weights: str) -> np.ndarray:
    """The most that a value may be off, float64 in the shape of `weight`."""
    inputs = tuple(range(-contracted, 0))
    step = np.abs(weight.astype(np.float64)).max(axis=inputs, keepdims=True) / LARGEST[weights]
    if weights == "int8":
        return np.broadcast_to(step / 2, weight.shape)
    # Three bits of mantissa; below 2^-6 the steps of fp8 are all 2^-9.
    return np.maximum(np.abs(weight) / 16, step * 2.0**-10)


@st.composite
def layers(draw) -> tuple[np.ndarray, np.ndarray, int]:
    """x[rows, *in], weight[*out, *in] whose outputs differ by orders of magnitude, and len(in)."""
    shapes = [((4,), (5,)), ((2, 1, 3), (4,)), ((3,), (2, 1, 4))]
    out, inputs = draw(st.sampled_from(shapes))
    rows = draw(st.sampled_from([2, 80]))  # as few as are streamed, and more
    numbers = st.floats(-1, 1, width=32)
    weight = draw(hnp.arrays(np.float32, (*out, *inputs), elements=numbers))
    scale = 10.0 ** draw(hnp.arrays(np.int8, out, elements=st.integers(-12, 12))).astype(np.float32)
    weight = (weight * np.reshape(scale, (*out, *(1,) * len(inputs)))).astype(np.float32)
    weight[np.abs(weight) < 1e-20] = 0  # a step must be a normal number too
    x = draw(hnp.arrays(np.float32, (rows, *inputs), elements=numbers, fill=numbers))
    return x, weight, len(inputs)


@pytest.mark.parametrize("weights", FORMATS)
@given(layer=layers())
def test_a_product_is_off_by_half_a_step_of_each_weight(weights, layer):
    x, weight, contracted = layer
    got = linear(jnp.asarray(x), quantized(weight, contracted, weights), contracted=contracted)
    dims = tuple(range(-contracted, 0))
    exact = np.tensordot(x.astype(np.float64), weight.astype(np.float64), (dims, dims))
    bound = np.tensordot(np.abs(x), half_step(weight, contracted, weights), (dims, dims))
    rounding = np.tensordot(np.abs(x), np.abs(weight).astype(np.float64), (dims, dims)) * 1e-5
    assert got.shape == exact.shape
    assert (np.abs(np.asarray(got, np.float64) - exact) <= bound * 1.001 + rounding + 1e-30).all()


@pytest.mark.parametrize("weights", FORMATS)
def test_a_product_in_blocks_is_the_product(weights):
    """The last of them overlaps the one before."""
    rng = np.random.default_rng(0)
    weight = rng.normal(size=(7, 41, 2, 256)).astype(np.float32)
    assert 2 * BLOCK < weight.size < 3 * BLOCK
    x = rng.normal(size=(3, 2, 256)).astype(np.float32)
    kept = quantized(weight, 2, weights)
    got = jax.jit(lambda *args: linear(*args, contracted=2))(jnp.asarray(x), kept)
    exact = np.einsum("rij,abij->rab", x.astype(np.float64), np.asarray(kept.values, np.float64))
    np.testing.assert_allclose(got, exact * np.asarray(kept.scale)[None], atol=1e-4)


@pytest.mark.parametrize("weights", FORMATS)
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_weight_that_is_no_number_is_not_hidden(weights, bad):
    weight = np.ones((3, 4), np.float32)
    weight[1, 2] = bad
    out = linear(jnp.ones((1, 4)), quantized(weight, 1, weights))
    assert np.isfinite(np.asarray(out)).tolist() == [[True, False, True]]


FAST = [("qwen3", "fp8"), ("qwen3_moe", "int8")]
EVERY = [
    pytest.param(*one, marks=[] if one in FAST else pytest.mark.slow)
    for one in product(CONFIGS, FORMATS)
]


@pytest.mark.parametrize(("name", "weights"), EVERY)
def test_linear_layers_are_quantized_and_nothing_else(name, weights):
    policy, params = policy_and_params(name)
    kept = policy.with_weights(weights)
    paths = jax.tree_util.tree_flatten_with_path(kept.abstract_params, is_leaf=is_quantized)[0]
    names = {
        ".".join(str(key.key) for key in path if isinstance(key, jax.tree_util.DictKey))
        for path, leaf in paths
        if is_quantized(leaf)
    }
    parts = [f"attention.{part}" for part in ("query", "key", "value", "out")]
    parts += [f"mlp.{part}" for part in ("gate", "up", "down")]
    num_layers = policy.config.num_layers
    assert names == {f"layers.{i}.{part}" for i in range(num_layers) for part in parts}
    assert kept.with_weights("auto").abstract_params == policy.abstract_params

    stored = kept.store(params, jnp.bfloat16)
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), stored)
    assert shapes == kept.abstract(jnp.bfloat16)
    whole = jax.tree.leaves(jax.tree.map(lambda x: x.size, policy.abstract_params))
    few = sum(x.nbytes for x in jax.tree.leaves(stored))
    layers = [leaf for _, leaf in paths if is_quantized(leaf)]
    in_layers = sum(math.prod(layer.shape) for layer in layers)
    outputs = sum(math.prod(layer.scale.shape) for layer in layers)
    assert few == 2 * (sum(whole) - in_layers) + in_layers + 4 * outputs


@pytest.mark.parametrize("weights", FORMATS)
def test_each_output_of_each_expert_has_a_scale(weights):
    """Of experts that differ by orders of magnitude, and whose outputs do too."""
    rng = np.random.default_rng(0)
    magnitudes = 10.0 ** rng.integers(-3, 3, (6, 7, 1))
    stack = (rng.normal(size=(6, 7, 5)) * magnitudes).astype(np.float32)
    kept = quantized(stack, 1, weights)
    assert (kept.values.shape, kept.scale.shape) == ((6, 7, 5), (6, 7))
    # Of a scale that several outputs or experts share they would be zeros.
    left = np.asarray(kept.values, np.float64) * np.asarray(kept.scale, np.float64)[..., None]
    assert (np.abs(left - stack) <= half_step(stack, 1, weights) * 1.001).all()

    x = rng.normal(size=(9, 5)).astype(np.float32)
    chosen = np.argsort(rng.random((9, 6)))[:, :2]
    shares = rng.random((9, 2)).astype(np.float32)
    rows = (jnp.asarray(each) for each in (x, chosen, shares))
    got = by_expert(lambda weight, x: linear(x, weight), kept, *rows, size=2)
    exact = np.einsum("rk,rkoi,ri->ro", shares, left[chosen], x.astype(np.float64))
    np.testing.assert_allclose(got, exact, atol=1e-5 * np.abs(exact).max())


@pytest.mark.parametrize(
    ("name", "weights"),
    [
        ("qwen3", "fp8"),
        pytest.param("qwen2", "int8", marks=pytest.mark.slow),
        pytest.param("qwen3_moe", "fp8", marks=pytest.mark.slow),
        ("qwen3_moe", "int8"),
    ],
)
def test_the_model_is_that_of_the_weights_that_are_left(name, weights):
    policy, params = policy_and_params(name)
    stored = policy.with_weights(weights).store(params, jnp.float32)
    tokens = jnp.asarray(np.random.default_rng(1).integers(0, VOCAB, (2, 12)))

    def logits(params) -> jax.Array:
        model = policy.bind(params)
        return model.logits(model(tokens, jnp.broadcast_to(jnp.arange(12), (2, 12)))[0])

    def restored(x):
        if not is_quantized(x):
            return x
        ones = (1,) * (x.values.ndim - x.scale.ndim)
        return x.values.astype(jnp.float32) * jnp.reshape(x.scale, (*x.scale.shape, *ones))

    got = jax.jit(logits)(stored)
    expected = jax.jit(logits)(jax.tree.map(restored, stored, is_leaf=is_quantized))
    np.testing.assert_allclose(got, expected, atol=1e-4)
    off = np.abs(got - jax.jit(logits)(params))
    # Some tokens of a model with experts have others than before.
    typical = np.median(off) if policy.config.experts else off.max()
    assert 1e-3 < typical < 0.2 * np.abs(expected).max()


@pytest.mark.parametrize(("name", "weights"), EVERY)
def test_random_and_loaded_weights_are_quantized_as_the_trainers_are(name, weights, tmp_path):
    policy, params = policy_and_params(name)
    kept = policy.with_weights(weights)
    export(tmp_path / "out", policy, params, jnp.float32)
    for got, expected in (
        (kept.init(3), kept.store(policy.init(3), jnp.float32)),
        (load_params(tmp_path / "out", kept, None, jnp.float32), kept.store(params, jnp.float32)),
    ):
        assert_same_bits(got, expected)


# The inputs of an output on several devices, whose largest counts; and experts, each on its own.
SPLIT = {
    "qwen3": (2, ("kv_heads", "mlp", "vocab"), (32, 32), (32,)),
    "qwen3_moe": (4, ("expert",), (2, 32, 16), (2, 32)),
}


@pytest.mark.parametrize("name", SPLIT)
def test_loaded_weights_are_quantized_across_their_shards(tmp_path, name):
    (count, split, values, scale), (policy, params) = SPLIT[name], policy_and_params(name)
    kept = policy.with_weights("int8")
    export(tmp_path / "out", policy, params, jnp.float32)
    mesh = jax.make_mesh((count,), ("all",), axis_types=(jax.sharding.AxisType.Auto,))
    shardings = jax.tree.map(
        lambda axes: jax.NamedSharding(mesh, jax.P(*("all" if x in split else None for x in axes))),
        kept.param_axes,
        is_leaf=lambda node: isinstance(node, tuple),
    )
    loaded = load_params(tmp_path / "out", kept, shardings, jnp.float32)
    assert_same_bits(loaded, kept.store(params, jnp.float32))
    assert jax.tree.map(lambda x: x.sharding, loaded) == shardings
    down = kept.bind(loaded).layers[0].mlp.down.get_value()
    assert {shard.data.shape for shard in down.values.addressable_shards} == {values}
    assert {shard.data.shape for shard in down.scale.addressable_shards} == {scale}
