"""The draw on two levels: which token, and how often."""

from collections.abc import Sequence
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from sampling_cases import SEQUENCES, chi_square, keys_of, own_noise, rows_of

from pat_jax.engine.device.decode.gumbel import BLOCK, exponentials
from pat_jax.engine.device.decode.sampling import NEG_INF, sample
from pat_jax.engine.sequences.sampling import Sampling
from pat_jax.engine.sequences.sequence_table import NO_TOKEN
from tests.near_ties import NEAR_TIE, perturbed

ROWS = len(SEQUENCES)


@partial(jax.jit, static_argnames="vocab")
def sampled(logits, keys, options, *, vocab):
    rows, padded = logits.shape
    seen = jnp.zeros((rows, 2, -(-padded // 32)), jnp.uint32)
    forbidden = jnp.full((rows, 1), NO_TOKEN, jnp.int32)
    return sample(logits, keys, options, seen, forbidden, vocab_size=vocab)


def drawn(
    logits: np.ndarray, options: Sequence[Sampling], vocab: int | None = None
) -> tuple[np.ndarray, ...]:
    """Tokens, log-probabilities and those without filters, of float32[rows, padded] logits."""
    rows, padded = logits.shape
    keys = keys_of(SEQUENCES[:rows])
    found = sampled(logits, keys, rows_of(options), vocab=vocab or padded)
    return tuple(map(np.asarray, found))


def log_softmax(logits: np.ndarray) -> np.ndarray:
    """float64."""
    below = logits.astype(np.float64) - logits.max(axis=-1, keepdims=True)
    return below - np.log(np.exp(below).sum(axis=-1, keepdims=True))


@pytest.mark.parametrize("vocab", [7, 509, 3 * BLOCK, 5 * 8 * 101, 41 * BLOCK])
@pytest.mark.parametrize("spread", [0.1, 3.0, 60.0])
def test_a_token_is_the_best_of_the_best_block(vocab: int, spread: float):
    rng, rows = np.random.default_rng(vocab), 512
    logits = rng.normal(0, spread, (rows, vocab)).astype(np.float32)
    logits[:, vocab // 3 : vocab // 2] = NEG_INF  # whole blocks may be empty
    tokens, logprobs, _ = drawn(logits, [Sampling()] * rows)
    expected, row = log_softmax(logits), np.arange(rows)
    of_blocks, inside = perturbed(expected, own_noise(SEQUENCES[:rows], vocab))
    block, place = np.divmod(tokens, inside.shape[2])
    assert (of_blocks[row, block] > of_blocks.max(axis=-1) - NEAR_TIE).all()
    assert (inside[row, block, place] > inside[row, block].max(axis=-1) - NEAR_TIE).all()
    np.testing.assert_allclose(logprobs, expected[row, tokens], atol=1e-4)


@pytest.mark.parametrize("options", [{}, {"top_k": 150}, {"top_p": 0.7}, {"min_p": 0.02}], ids=str)
def test_tokens_of_many_blocks_follow_the_distribution(options):
    vocab = 5 * BLOCK
    logits = np.random.default_rng(2).normal(0, 1.5, vocab).astype(np.float32)
    tokens = drawn(np.broadcast_to(logits, (ROWS, vocab)), [Sampling(**options)] * ROWS)[0]
    probs = np.exp(log_softmax(logits))
    order = np.argsort(-probs)
    before = np.cumsum(probs[order]) - probs[order]
    is_kept = before < options.get("top_p", 1.0)
    is_kept &= np.arange(vocab) < options.get("top_k", vocab)
    is_kept &= probs[order] >= options.get("min_p", 0.0) * probs.max()
    expected = np.zeros(vocab)
    expected[order[is_kept]] = probs[order[is_kept]] / probs[order[is_kept]].sum()
    counts = np.bincount(tokens, minlength=vocab)
    assert not counts[expected == 0].any()
    assert chi_square(counts, expected * ROWS) > 1e-3
    by_block = (x.reshape(-1, BLOCK).sum(axis=1) for x in (counts, expected * ROWS))
    assert chi_square(*by_block) > 1e-3


def test_padding_by_more_blocks_changes_no_token():
    """Which runs on other numbers of devices may differ by."""
    logits = np.random.default_rng(3).normal(0, 2, (256, 9 * BLOCK)).astype(np.float32)
    found = [
        drawn(logits[:, : blocks * BLOCK], [Sampling()] * 256, vocab=300)[0] for blocks in (3, 4, 9)
    ]
    for other in found[1:]:
        np.testing.assert_array_equal(other, found[0])
    assert found[0].max() < 300


@pytest.mark.parametrize("vocab", [61, 3 * BLOCK])
@pytest.mark.parametrize("temperature", [1e-6, 1e-4, 1e-2, 0.3])
@pytest.mark.parametrize(
    "options", [{}, {"top_k": 2}, {"top_p": 0.9, "repetition_penalty": 1.3}], ids=str
)
def test_no_log_probability_is_above_zero(vocab: int, temperature: float, options):
    rng, rows = np.random.default_rng(vocab), 64
    logits = rng.normal(0, 8, (rows, vocab)).astype(np.float32)
    logits[:, 3] = logits.max(axis=1) - rng.exponential(temperature, rows).astype(np.float32)
    row = np.arange(rows)
    tokens, logprobs, unfiltered = drawn(
        logits, [Sampling(temperature=temperature, **options)] * 64
    )
    assert np.isfinite(logprobs).all() and (logprobs <= 0).all() and (unfiltered <= 0).all()
    below = logits.astype(np.float64) - logits.max(axis=1, keepdims=True)
    expected = log_softmax(below / temperature)[row, tokens]
    np.testing.assert_allclose(unfiltered, expected, atol=2e-5, rtol=1e-5)
    assert (logprobs >= unfiltered - 1e-5).all()


def test_noise_is_exponential_and_never_zero_or_infinite(monkeypatch):
    noise = np.asarray(exponentials(keys_of(SEQUENCES[:500]), 400)).ravel()
    quantiles = np.floor(-np.expm1(-noise.astype(np.float64)) * 100).astype(int)
    assert chi_square(np.bincount(quantiles), np.full(100, noise.size / 100)) > 1e-3
    every = np.array([0, 1, 2, 2**24, 2**31, 2**32 - 2**8, 2**32 - 1], np.uint32)
    monkeypatch.setattr(jax.random, "bits", lambda key, shape, dtype: jnp.asarray(every))
    found = np.asarray(exponentials(keys_of(SEQUENCES[:1]), len(every)))[0]
    exact = -np.log1p(-np.minimum((every + 0.5) / 2**32, 1 - 2.0**-24))
    np.testing.assert_allclose(found, exact, rtol=1e-5)
    assert found.min() > 1e-10 and found.max() < 17
