"""Chunked log-probabilities against NumPy in float64, and the memory and traffic they promise."""

import math
import re
import subprocess
import sys
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from chex import assert_trees_all_equal

from pat_jax.profiling.cross_compile.compile import environment
from pat_jax.profiling.predict.targets import Target
from pat_jax.rl.algorithm.logprobs import token_logprobs
from tests.hlo_text import flops, loops

ROWS, LENGTH, EMBED, VOCAB, PADDED = 3, 14, 6, 29, 32
TARGETS = np.random.default_rng(1).integers(0, VOCAB, (ROWS, LENGTH)).astype(np.int32)


def weights(scale: float = 1.0) -> tuple[jax.Array, jax.Array]:
    rng = np.random.default_rng(0)
    hidden, head = scale * rng.normal(size=(ROWS, LENGTH, EMBED)), rng.normal(size=(PADDED, EMBED))
    return jnp.asarray(hidden, jnp.float32), jnp.asarray(head, jnp.float32)


@partial(jax.jit, static_argnames=("chunk", "temperature", "has_entropy_gradient"))
def run(hidden, head, *, chunk: int = 4, temperature: float = 1.0, has_entropy_gradient=False):
    with jax.numpy_dtype_promotion("strict"):
        return token_logprobs(
            hidden,
            jnp.asarray(TARGETS),
            head,
            vocab_size=VOCAB,
            chunk=chunk,
            temperature=temperature,
            has_entropy_gradient=has_entropy_gradient,
        )


def reference(hidden, head, temperature=1.0):
    logits = np.asarray(hidden, np.float64) @ np.asarray(head, np.float64).T
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
    """The last of the hidden numbers is 1, so that a weight of the head is added to a logit."""
    hidden, head = weights()
    hidden = jnp.concatenate([hidden, jnp.ones((ROWS, LENGTH, 1))], axis=-1)

    @partial(jax.grad, argnums=(0, 1), has_aux=True)
    def outputs(hidden, head):
        found = run(hidden, head, has_entropy_gradient=True)
        return sum(x.sum() for x in found), found

    def of_padding(value: float):
        bias = jnp.where(jnp.arange(PADDED) < VOCAB, 0.3, value)
        return jax.jit(outputs)(hidden, jnp.concatenate([head, bias[:, None]], axis=-1))

    expected = of_padding(-1e9)
    assert not np.any(expected[0][1][VOCAB:]) and np.any(expected[0][1][:VOCAB])
    for value in (0.0, 1e6):
        assert_trees_all_equal(of_padding(value), expected)


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
    expected, _ = reference(hidden.astype(jnp.float32), head.astype(jnp.float32))
    np.testing.assert_allclose(logprobs, expected, atol=1e-5)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize(
    ("chunk", "temperature", "has_entropy_gradient"),
    [(4, 0.7, True), (4, 1.0, False), (5, 0.0, True), (100, 1.7, False)],
)
def test_gradients_are_those_of_plain_float64(dtype, chunk, temperature, has_entropy_gradient):
    """By differentiation of whole logits. Some positions are in no loss. In bfloat16, the gradients
    of logits and of hidden states are rounded, each to 1/256 at most."""
    rng = np.random.default_rng(2)
    hidden, head = (np.asarray(x.astype(dtype), np.float64) for x in weights())
    of_target, of_entropy = rng.normal(size=(2, ROWS, LENGTH)) * (rng.random((ROWS, LENGTH)) < 0.7)

    def chunked(hidden, head):
        how = {"chunk": chunk, "temperature": temperature}
        found = run(hidden, head, **how, has_entropy_gradient=has_entropy_gradient)
        return (of_target * found[0] + of_entropy * found[1]).sum()

    def plain(hidden, head):
        logprobs = jax.nn.log_softmax((hidden @ head.T)[..., :VOCAB] / (temperature or 1.0))
        picked = jnp.take_along_axis(logprobs, jnp.asarray(TARGETS)[..., None], axis=-1)[..., 0]
        entropy = -(jnp.exp(logprobs) * logprobs).sum(axis=-1)
        return (of_target * picked + has_entropy_gradient * of_entropy * entropy).sum()

    with jax.enable_x64(True):
        wanted = jax.jit(jax.grad(plain, (0, 1)))(hidden, head)
    found = jax.jit(jax.grad(chunked, (0, 1)))(jnp.asarray(hidden, dtype), jnp.float32(head))
    assert [x.dtype for x in found] == [dtype, jnp.float32]
    error = 2e-6 if dtype == jnp.float32 else 8e-3
    for value, expected in zip(found, wanted, strict=True):
        largest = np.abs(expected).max()
        np.testing.assert_allclose(
            np.asarray(value, np.float64), expected, rtol=0, atol=error * largest
        )
    is_counted = (of_target != 0) | (of_entropy != 0)
    assert not np.any(np.asarray(found[0])[~is_counted])


@pytest.mark.parametrize("is_frozen", [False, True])
def test_a_frozen_head_has_no_gradient(is_frozen):
    """Logits are computed twice; then there is a product for each gradient."""
    rows, length, embed, vocab = BIG.values()
    function = jax.grad(big_loss(8), argnums=0 if is_frozen else (0, 1), has_aux=True)
    once = 2 * rows * length * embed * vocab
    assert flops(compiled_text(function, big_arguments())) == (3 if is_frozen else 4) * once


# Sizes at which nothing but the logits of all positions reaches rows * length * vocab numbers.
BIG = {"rows": 4, "length": 64, "embed": 8, "vocab": 256}


def big_loss(chunk: int):
    def loss(hidden, head, targets):
        logprobs, entropy = token_logprobs(
            hidden, targets, head, vocab_size=BIG["vocab"] - 3, chunk=chunk
        )
        return logprobs.sum(), entropy

    return loss


def big_arguments():
    rows, length, embed, vocab = BIG.values()
    return (
        jax.ShapeDtypeStruct((rows, length, embed), jnp.float32),
        jax.ShapeDtypeStruct((vocab, embed), jnp.float32),
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
    gradient = jax.grad(big_loss(chunk), argnums=(0, 1), has_aux=True)
    largest = largest_in_hlo(compiled_text(gradient, big_arguments()))
    assert (largest >= rows * length * vocab) == is_whole


# Gradients of the loss of Qwen3-0.6B in bfloat16, with padding of the vocabulary and a temperature.
OF_A_GPU = """
import sys
import jax, jax.numpy as jnp
from pat_jax.profiling.cross_compile.worker import devices_of
from pat_jax.profiling.predict.targets import Target
from pat_jax.rl.algorithm.logprobs import token_logprobs

tokens, chunk, vocab, embed = map(int, sys.argv[2:])
device = devices_of(Target.parse(sys.argv[1]))[0]

def loss(hidden, head, targets, weights):
    how = {"vocab_size": vocab - 64, "temperature": 0.7, "chunk": chunk}
    logprobs, entropy = token_logprobs(hidden, targets, head, **how)
    return (weights * logprobs).sum(), entropy

given = [
    jax.ShapeDtypeStruct(shape, dtype, sharding=jax.sharding.SingleDeviceSharding(device))
    for shape, dtype in (
        ((1, tokens, embed), jnp.bfloat16),
        ((vocab, embed), jnp.float32),
        ((1, tokens), jnp.int32),
        ((1, tokens), jnp.float32),
    )
]
gradient = jax.jit(jax.grad(loss, argnums=(0, 1), has_aux=True))
print(gradient.lower(*given).compile().as_text())
"""


@pytest.mark.cross_compile
def test_compiled_for_a_gpu_the_loops_read_no_constant_as_large_as_the_logits():
    tokens, chunk, vocab, embed = 8192, 2048, 151_936, 1024
    command = [sys.executable, "-c", OF_A_GPU, "h100:1", *map(str, (tokens, chunk, vocab, embed))]
    there = environment(Target.parse("h100:1"))
    done = subprocess.run(command, env=there, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    forward, backward = loops(done.stdout)
    assert forward.count == backward.count == tokens // chunk
    for loop in (forward, backward):
        assert max(math.prod(dims) for _, dims in loop.carried) <= vocab * embed < chunk * vocab
    # Logits are written once and read twice; then written and read again, and their gradients
    # written once and read twice, half as large. The head is read three times, its sum is added to.
    logits, head = 4 * chunk * vocab, 2 * vocab * embed
    least = (3 + 2 + 3 / 2) * logits + 3 * head + 2 * 2 * head
    assert least <= forward.moved + backward.moved < 1.15 * least
