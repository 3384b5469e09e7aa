"""Draws on two levels, and what top-k and top-p keep, against NumPy in float64."""

from collections.abc import Sequence
from functools import partial

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from sampling_cases import SEQUENCES, chi_square, keys_of, own_noise, rows_of

from pat_jax.engine.device.decode.gumbel import exponentials
from pat_jax.engine.device.decode.sampling import NEG_INF, _floor, sample
from pat_jax.engine.sequences.sampling import Sampling
from pat_jax.engine.sequences.sequence_table import NO_TOKEN
from pat_jax.engine.sequences.types import RowSampling
from pat_jax.models.config import VOCAB_BLOCK as BLOCK
from tests.near_ties import NEAR_TIE, perturbed

VOCAB, ROWS = 61, 3
NEAR = 2e-6  # how far float32 may take the sum of a few thousand probabilities
TINIEST = np.finfo(np.float32).tiny  # XLA takes smaller numbers for zero on some machines


@jax.jit
def survivors(logits, options):
    return ~(logits < _floor(logits, jnp.ones(len(logits)), options))


def survive(logits: np.ndarray, top_k: int = 0, top_p: float = 1.0) -> np.ndarray:
    """Of rows with the same options, as bool[rows, vocab]."""
    options = RowSampling.empty(len(logits))
    for row in range(len(logits)):
        options.put(row, Sampling(top_k=top_k, top_p=top_p), prompt_length=0)
    return np.asarray(survivors(logits, options))


def sorted_survivors(logits: np.ndarray, top_k: int, top_p: float) -> np.ndarray:
    """Of one row: sort, cut, add up from the top, cut again; ties share one fate."""
    x = np.where(np.abs(logits) < TINIEST, 0.0, logits).astype(np.float64)
    descending = np.sort(x)[::-1]
    kept = x >= descending[min(top_k or len(x), len(x)) - 1]
    if top_p >= 1:
        return kept
    probs = np.where(kept, np.exp(x - x.max()), 0.0)
    ascending = np.argsort(x)
    mass_from = np.append(np.cumsum(probs[ascending][::-1])[::-1], 0.0) / probs.sum()
    mass_above = mass_from[np.searchsorted(x[ascending], x, side="right")]
    return kept & (mass_above < top_p)


def assert_survivors(logits: np.ndarray, top_k: int, top_p: float) -> None:
    for row, found in zip(logits, survive(logits, top_k, top_p), strict=True):
        if top_p >= 1:
            np.testing.assert_array_equal(found, sorted_survivors(row, top_k, top_p))
            continue
        fewest = sorted_survivors(row, top_k, top_p - NEAR)
        most = sorted_survivors(row, top_k, top_p + NEAR)
        assert (fewest <= found).all() and (found <= most).all()
        assert found[row.argmax()]
        assert not found[row < row[found].min()].any()  # none is passed over


ODD = [0.0, -0.0, 1e-45, -1e-45, 1e-38, -1e-38, 1e-30, 88.0, -88.0, -104.0, NEG_INF, -1e36, 3e38]
LOGITS = arrays.arrays(
    np.float32,
    (ROWS, VOCAB),
    elements=st.one_of(
        st.floats(-30, 30, width=32),
        st.floats(-8, 8, width=16),
        st.integers(-3, 3).map(float),  # ties
        st.sampled_from(ODD).map(lambda x: float(np.float32(x))),
    ),
)


@given(
    logits=LOGITS,
    top_k=st.one_of(st.sampled_from([0, 1, VOCAB, VOCAB + 1, 2**31 - 1]), st.integers(1, VOCAB)),
    top_p=st.one_of(
        st.sampled_from([1.0, 1e-320, 1e-40, 1e-30, 1e-6, 1 - 2.0**-24]),
        st.floats(2**-7, 1, width=32),
    ),
)
def test_any_logits(logits, top_k, top_p):
    assert_survivors(logits, top_k, top_p)


@pytest.mark.parametrize("vocab", [1, 509, 5 * 8 * 101])
@pytest.mark.parametrize("spread", [0.01, 3.0, 60.0])
@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16])  # whose logits are often ties
def test_larger_vocabularies(vocab, spread, dtype):
    logits = np.random.default_rng(vocab).normal(-5, spread, (ROWS, vocab))
    logits = logits.astype(dtype).astype(np.float32)
    for top_k in (0, 1, 50, vocab // 2, vocab):
        for top_p in (1e-9, 0.3, 0.95, 1.0):
            assert_survivors(logits, top_k, top_p)


def test_where_most_is_forbidden_nothing_else_is_lost():
    logits = np.full((1, VOCAB), NEG_INF, np.float32)
    logits[0, [3, 40]] = [1.0, -2.0]
    for top_k, top_p in ((2, 1.0), (30, 1.0), (0, 0.99), (9, 0.99)):
        found = survive(logits, top_k, top_p)[0]
        assert found[3] and found[40]
        assert found.sum() in (
            2,
            VOCAB,
        )  # what is forbidden has no mass: kept or not, it is not drawn
    assert survive(logits, top_p=0.9)[0].sum() == 1


DRAWS = len(SEQUENCES)


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
    tokens = drawn(np.broadcast_to(logits, (DRAWS, vocab)), [Sampling(**options)] * DRAWS)[0]
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
    assert chi_square(counts, expected * DRAWS) > 1e-3
    by_block = (x.reshape(-1, BLOCK).sum(axis=1) for x in (counts, expected * DRAWS))
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
