"""Chunked log-probabilities against NumPy in float64, and the memory and traffic they promise."""

import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from chex import assert_trees_all_equal

from pat_jax.rl.algorithm.logprobs import token_logprobs

ROWS, LENGTH, EMBED, VOCAB, PADDED = 3, 14, 6, 29, 32
TARGETS = np.random.default_rng(1).integers(0, VOCAB, (ROWS, LENGTH)).astype(np.int32)


def weights(scale: float = 1.0) -> tuple[jax.Array, jax.Array]:
    rng = np.random.default_rng(0)
    hidden, head = scale * rng.normal(size=(ROWS, LENGTH, EMBED)), rng.normal(size=(EMBED, PADDED))
    return jnp.asarray(hidden, jnp.float32), jnp.asarray(head, jnp.float32)


@partial(jax.jit, static_argnames=("chunk", "temperature"))
def run(hidden, head, *, chunk: int = 4, temperature: float = 1.0):
    with jax.numpy_dtype_promotion("strict"):
        return token_logprobs(
            hidden,
            jnp.asarray(TARGETS),
            lambda x: x @ head,
            vocab_size=VOCAB,
            chunk=chunk,
            temperature=temperature,
        )


def reference(hidden, head, temperature=1.0):
    logits = np.asarray(hidden, np.float64) @ np.asarray(head, np.float64)
    logits = logits[..., :VOCAB] / temperature
    logits -= logits.max(axis=-1, keepdims=True)
    logprobs = logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))
    target = np.take_along_axis(logprobs, TARGETS[..., None], axis=-1)[..., 0]
    return target, -(np.exp(logprobs) * logprobs).sum(axis=-1)


@pytest.mark.parametrize(
    ("chunk", "temperature"),
    [(1, 0.5), (4, 1.0), (7, 1.7), (100, 0.0)],  # greedy sampling trains at temperature 1
)
def test_matches_log_softmax(chunk, temperature):
    hidden, head = weights()
    logprobs, entropy = run(hidden, head, chunk=chunk, temperature=temperature)
    expected, expected_entropy = reference(hidden, head, temperature or 1.0)
    np.testing.assert_allclose(logprobs, expected, atol=1e-5)
    np.testing.assert_allclose(entropy, expected_entropy, atol=1e-5)


def test_what_the_padded_logits_hold_has_no_influence():
    hidden, head = weights()
    is_padding = jnp.arange(PADDED) >= VOCAB

    @partial(jax.grad, has_aux=True)
    def outputs(hidden, value):
        logprobs, entropy = token_logprobs(
            hidden,
            jnp.asarray(TARGETS),
            lambda x: jnp.where(is_padding[None, None], value, x @ head),
            vocab_size=VOCAB,
            chunk=4,
        )
        return logprobs.sum(), (logprobs, entropy)

    outputs = jax.jit(outputs)
    expected = outputs(hidden, -1e9)
    for padding in (-np.inf, 0.0, 1e6):
        assert_trees_all_equal(outputs(hidden, padding), expected)


def test_extreme_logits_stay_finite():
    hidden, head = weights(scale=1e4)
    logprobs, entropy = run(hidden, head)
    expected, expected_entropy = reference(hidden, head)
    np.testing.assert_allclose(logprobs, expected, rtol=1e-5, atol=1e-2)
    np.testing.assert_allclose(entropy, expected_entropy, atol=1e-2)


def test_low_precision_logits_are_normalised_in_float32():
    hidden, head = (x.astype(jnp.bfloat16) for x in weights())
    logprobs, entropy = run(hidden, head)
    assert logprobs.dtype == entropy.dtype == jnp.float32
    logits = np.asarray((hidden @ head).astype(jnp.float32))
    expected, _ = reference(logits, np.eye(PADDED))
    np.testing.assert_allclose(logprobs, expected, atol=1e-5)


def test_the_gradient_is_the_one_without_chunks_and_entropies_have_none():
    hidden, head = weights()
    cotangent = jnp.asarray(np.random.default_rng(2).normal(size=(ROWS, LENGTH)), jnp.float32)

    def chunked(hidden, head):
        logprobs, entropy = run(hidden, head, temperature=0.7)
        return (cotangent * (logprobs + entropy)).sum()

    def plain(hidden, head):
        logprobs = jax.nn.log_softmax((hidden @ head)[..., :VOCAB] / 0.7)
        picked = jnp.take_along_axis(logprobs, jnp.asarray(TARGETS)[..., None], axis=-1)[..., 0]
        return (cotangent * picked).sum()

    got, expected = (jax.jit(jax.grad(f, (0, 1)))(hidden, head) for f in (chunked, plain))
    for value, wanted in zip(got, expected, strict=True):
        np.testing.assert_allclose(value, wanted, rtol=1e-4, atol=1e-5)


# Sizes at which nothing but the logits of all positions reaches rows * length * vocab numbers.
BIG = {"rows": 4, "length": 64, "embed": 8, "vocab": 256}


def big_gradient(chunk: int):
    def loss(hidden, head, targets):
        logprobs, entropy = token_logprobs(
            hidden, targets, lambda x: x @ head, vocab_size=BIG["vocab"] - 3, chunk=chunk
        )
        return logprobs.sum(), entropy

    return jax.grad(loss, argnums=(0, 1), has_aux=True)


def big_arguments():
    rows, length, embed, vocab = BIG.values()
    return (
        jax.ShapeDtypeStruct((rows, length, embed), jnp.float32),
        jax.ShapeDtypeStruct((embed, vocab), jnp.float32),
        jax.ShapeDtypeStruct((rows, length), jnp.int32),
    )


def compiled_text(function, arguments) -> str:
    text = jax.jit(function).lower(*arguments).compile().as_text()
    assert text is not None
    return text


def largest_in_hlo(text: str) -> int:
    shapes = re.findall(r"\b(?:f32|bf16|pred|s32)\[([\d,]+)\]", text)
    return max(int(np.prod([int(n) for n in shape.split(",")])) for shape in shapes)


@pytest.mark.parametrize("chunk", [8, 64])
def test_the_logits_of_all_positions_never_exist(chunk):
    """With one chunk of the whole length they do: that is how the test knows that it looks."""
    rows, length, _, vocab = BIG.values()
    is_whole = chunk == length
    largest = largest_in_hlo(compiled_text(big_gradient(chunk), big_arguments()))
    assert (largest >= rows * length * vocab) == is_whole
