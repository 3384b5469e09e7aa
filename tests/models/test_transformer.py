"""The transformer against its own definitions: cache, causality, rotary positions, sizes."""

import functools
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pat_jax.common.errors import UserError
from pat_jax.models import layers
from pat_jax.models.cache.paged_layer import PagedLayer
from pat_jax.models.policy import Policy
from pat_jax.models.presets import PRESETS, preset
from pat_jax.models.rematerialization import NONE, POLICIES
from pat_jax.models.transformer import Layer
from tests.lossless import EXPERTS, MODELS, lively_params

VOCAB = 61
# BigMac is in the tests of layers, layouts and switches.
SOME = MODELS | {name: EXPERTS[name] for name in ("moe", "mixtral")}


@functools.cache
def policy_and_params(name):
    policy = Policy.from_config(SOME[name])
    return policy, lively_params(policy)


def random_tokens(rows, length):
    return jnp.asarray(np.random.default_rng(0).integers(0, VOCAB, (rows, length)))


@functools.partial(jax.jit, static_argnames=("name", "remat", "dtype"))
def forward(name, params, tokens, positions=None, cache=None, *, remat=NONE, dtype=jnp.float32):
    if positions is None:
        positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
    model = policy_and_params(name)[0].bind(params)
    hidden, cache, _ = model(tokens, positions, cache, remat=remat, dtype=dtype)
    return model.logits(hidden), cache


@pytest.mark.parametrize(
    "name", [pytest.param(x, marks=[pytest.mark.slow] * (x not in ("kv2", "moe"))) for x in SOME]
)
def test_decoding_with_a_cache_equals_the_full_forward(name):
    """Rows stand at different positions, and what lies beyond them in their pages is refuse."""
    policy, params = policy_and_params(name)
    tokens, length, prefilled = random_tokens(2, 12), np.array([6, 3]), 6
    full, _ = forward(name, params, tokens)

    config = policy.config
    pool = jnp.full((5, config.num_kv_heads, 8, config.head_dim), 1e3)
    pages = PagedLayer(pool, pool, jnp.array([[1, 3], [4, 2]]))
    refuse = (pages,) * config.num_layers
    start = np.broadcast_to(np.arange(prefilled), (2, prefilled))
    logits, cache = forward(name, params, tokens[:, :prefilled], start, refuse)
    np.testing.assert_allclose(logits, full[:, :prefilled], atol=2e-5)
    for _ in range(6):
        token = jnp.take_along_axis(tokens, jnp.asarray(length[:, None]), axis=1)
        logits, cache = forward(name, params, token, length[:, None], cache)
        np.testing.assert_allclose(logits[:, 0], full[np.arange(2), length], atol=2e-5)
        length = length + 1


@pytest.mark.parametrize("name", SOME)
def test_a_token_moves_itself_and_later_positions_only(name):
    _, params = policy_and_params(name)
    tokens = random_tokens(1, 12)
    changed = tokens.at[0, 7].set((tokens[0, 7] + 1) % VOCAB)
    before, _ = forward(name, params, tokens)
    after, _ = forward(name, params, changed)
    moved = np.abs(after - before)[0].max(axis=-1)
    np.testing.assert_array_equal(moved[:7], 0)
    assert (moved[7:] > 1e-3).all()


@pytest.mark.parametrize("remat", [NONE, *POLICIES])
def test_one_layer_is_traced_for_all(monkeypatch, remat):
    """What a start from the cache takes is mostly tracing, and models have dozens of layers."""
    num_traced, call = [], Layer.__call__

    def counted(*args):
        num_traced.append(1)
        return call(*args)

    monkeypatch.setattr(Layer, "__call__", counted)
    policy = Policy.from_config(
        replace(MODELS["kv1"], num_layers=5, embed_dim=24)
    )  # traced nowhere else
    tokens = jax.ShapeDtypeStruct((2, 7), jnp.int32)

    def hidden(params, tokens):
        return policy.bind(params)(tokens, jnp.arange(7)[None, :], remat=remat)[0]

    assert "rsqrt" in jax.jit(hidden).lower(policy.abstract_params, tokens).as_text()
    assert len(num_traced) == 1


def test_bfloat16_is_used_when_asked_for_and_logits_stay_float32():
    policy, params = policy_and_params("kv8")
    tokens = random_tokens(2, 8)
    hidden = jax.eval_shape(
        lambda params: policy.bind(params)(tokens, tokens, dtype=jnp.bfloat16)[0], params
    )
    assert hidden.dtype == jnp.bfloat16
    low, _ = forward("kv8", params, tokens, dtype=jnp.bfloat16)
    high, _ = forward("kv8", params, tokens)
    assert low.dtype == jnp.float32
    error = np.abs(low - high).max() / np.abs(high).max()
    assert 1e-5 < error < 0.05


def test_rotation_equals_complex_multiplication_in_float64():
    config = MODELS["kv2"]
    x = np.random.default_rng(0).normal(size=(2, 5, 3, 8)).astype(np.float32)
    positions = np.array([[0, 1, 2, 3, 4], [7, 100, 1023, 2048, 4095]])
    rotation = layers.angles(jnp.asarray(positions), layers.rope_frequencies(config))
    got = layers.rotate(jnp.asarray(x), rotation)

    frequencies = config.rope_theta ** -(np.arange(4) / 4)
    turns = np.exp(1j * positions[..., None, None] * frequencies)
    rotated = (x[..., :4] + 1j * x[..., 4:].astype(np.float64)) * turns
    expected = np.concatenate([rotated.real, rotated.imag], axis=-1)
    np.testing.assert_allclose(got[0], expected[0], atol=2e-6)
    np.testing.assert_allclose(got[1], expected[1], atol=1e-3)  # float32 angles up to 4095


def test_equal_configurations_make_equal_trees():
    """Else parameters made under one policy would not fit programs compiled under another."""
    first, second = Policy.from_config(MODELS["kv8"]), Policy.from_config(MODELS["kv8"])
    assert jax.tree.structure(first.abstract_params) == jax.tree.structure(second.abstract_params)
    assert first.definition == second.definition
    assert hash(first.definition) == hash(second.definition)


# Counts published with the checkpoints, tied embeddings counted once.
PUBLISHED_SIZES = {
    "qwen3-0.6b": 596_049_920,
    "qwen3-1.7b": 1_720_574_976,
    "qwen3-4b": 4_022_468_096,
    "qwen3-8b": 8_190_735_360,
    "qwen3-14b": 14_768_307_200,
    "llama-3.1-8b": 8_030_261_248,
    "llama-3.1-70b": 70_553_706_496,
    "qwen2.5-7b": 7_615_616_512,
    "qwen3-30b-a3b": 30_532_122_624,
    "qwen3-235b-a22b": 235_093_634_560,
    "mixtral-8x7b": 46_702_792_704,
}


# One of each family and form.
SIZED = ("qwen3-0.6b", "llama-3.1-8b", "qwen2.5-7b", "qwen3-30b-a3b", "mixtral-8x7b")


@pytest.mark.parametrize(
    "name",
    [pytest.param(x, marks=[] if x in SIZED else pytest.mark.slow) for x in PUBLISHED_SIZES],
)
def test_published_shapes_have_the_published_number_of_parameters(name):
    policy = Policy.from_config(preset(name))
    assert (
        sum(leaf.size for leaf in jax.tree.leaves(policy.abstract_params)) == PUBLISHED_SIZES[name]
    )


def test_own_presets_take_the_callers_vocabulary():
    demo = preset("demo", vocab_size=70)
    assert (demo.vocab_size, demo.padded_vocab_size) == (70, 96)
    assert preset("demo") == PRESETS["demo"]
    policy = Policy.from_config(preset("random-100m"))
    sizes = [leaf.size for leaf in jax.tree.leaves(policy.abstract_params)]
    embedding_size = policy.config.padded_vocab_size * policy.config.embed_dim
    assert 98e6 < sum(sizes) < 105e6
    assert embedding_size < 0.05 * sum(sizes)


def test_an_unknown_preset_is_refused_with_the_nearest():
    with pytest.raises(UserError, match=r"'qwen3-0.6' is not a built-in.*nearest is 'qwen3-0.6b'"):
        preset("qwen3-0.6")


@pytest.mark.parametrize("dtype, tolerance", [(jnp.float32, 1e-5), (jnp.bfloat16, 0.04)])
def test_swiglu_and_its_gradients_are_those_of_its_formula(dtype, tolerance):
    gate = np.array([-1e4, -200.0, -5.0, -0.5, 0.0, 0.5, 5.0, 200.0, 1e4])
    up, grad = np.linspace(-2, 3, 9), np.linspace(1, -2, 9)
    share = np.exp(np.minimum(gate, 0)) / (1 + np.exp(-np.abs(gate)))
    expected = gate * share * up, grad * up * share * (1 + gate * (1 - share)), grad * gate * share
    inputs = [jnp.asarray(x, dtype) for x in (gate, up)]
    out, backward = jax.vjp(layers.swiglu, *inputs)
    for found, wanted in zip((out, *backward(jnp.asarray(grad, dtype))), expected, strict=True):
        np.testing.assert_allclose(np.asarray(found, np.float64), wanted, tolerance, tolerance)
