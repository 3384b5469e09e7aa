"""Sampling against float64 in NumPy: what is drawn, and how often, under every option."""

from functools import partial
from itertools import product

import jax
import numpy as np
import pytest
from sampling_cases import (
    ENDINGS,
    LOGITS,
    OPTIONS,
    PADDED,
    PROMPT,
    RESPONSE,
    ROWS,
    SEQUENCES,
    VOCAB,
    draw,
    keys_of,
    own_noise,
    rows_of,
    seen_in,
)

from pat_jax.engine.device.decode.sampling import likeliest, sample, sequence_key
from pat_jax.engine.sequences.sampling import Sampling
from tests.near_ties import NEAR_TIE, perturbed


def drawn(*, logits=LOGITS, sequences=SEQUENCES, is_early=False, **options):
    """Tokens and log-probabilities of one distribution for every sequence."""
    rows = len(sequences)
    tokens, logprobs, _ = draw(
        np.broadcast_to(logits, (rows, PADDED)),
        keys_of(sequences),
        rows_of([Sampling(**options)] * rows),
        seen_in(rows),
        np.broadcast_to(np.array(ENDINGS if is_early else [-1, -1], np.int32), (rows, 2)),
    )
    return np.asarray(tokens), np.asarray(logprobs)


def reference(
    *,
    logits=LOGITS,
    is_early=False,
    temperature=1.0,
    top_k=0,
    top_p=1.0,
    min_p=0.0,
    repetition_penalty=1.0,
    presence_penalty=0.0,
) -> np.ndarray:
    """Probabilities, float64[vocab], by counting, sorting and cutting in the plainest way."""
    changed = logits[:VOCAB].astype(np.float64)
    for token in set(PROMPT) | set(RESPONSE):
        is_likely = changed[token] > 0
        changed[token] *= 1 / repetition_penalty if is_likely else repetition_penalty
    for token in set(RESPONSE):
        changed[token] -= presence_penalty
    if is_early:
        changed[ENDINGS] = -np.inf
    scaled = changed / temperature
    probs = np.exp(scaled - scaled.max())
    if top_k:
        probs[np.argsort(-probs)[top_k:]] = 0.0
    probs /= probs.sum()
    order, mass, kept = np.argsort(-probs), 0.0, np.zeros(VOCAB)
    for token in order:
        if mass < top_p:
            kept[token] = probs[token]
            mass += probs[token]
    kept[kept < min_p * kept.max()] = 0.0
    return kept / kept.sum()


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_each_token_is_the_one_that_its_noise_says(options):
    tokens, logprobs = drawn(**options)
    expected = reference(**options)
    with np.errstate(divide="ignore"):
        log_probs = np.log(expected)
    each = np.broadcast_to(log_probs, (ROWS, VOCAB))
    scores, inside = perturbed(each, own_noise(SEQUENCES))
    assert scores.shape == (ROWS, 1)  # so small a vocabulary is one block
    score = np.take_along_axis(inside[:, 0], tokens[:, None], axis=-1)[:, 0]
    assert (score > inside[:, 0].max(axis=-1) - NEAR_TIE).all()
    np.testing.assert_allclose(logprobs, log_probs[tokens], atol=1e-5)


def test_greedy_heeds_penalties_and_what_is_forbidden():
    asked = {"repetition_penalty": 8.0, "presence_penalty": 3.0, "is_early": True}
    tokens, logprobs = drawn(temperature=0.0, **asked)
    expected = reference(**asked)
    assert set(tokens) == {expected.argmax()} != {LOGITS[:VOCAB].argmax()}
    np.testing.assert_allclose(logprobs, np.log(expected.max()), atol=1e-5)


@pytest.mark.parametrize("options", [*OPTIONS, {"temperature": 0.0}], ids=str)
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_logit_that_is_no_number_shows_whatever_the_options_are(options, bad):
    for where in (0, 9, 33):
        logits = np.where(np.arange(PADDED) == where, bad, LOGITS).astype(np.float32)
        tokens, logprobs = drawn(logits=logits, sequences=SEQUENCES[:8], **options)
        is_forbidden = options.get("is_early", False) and where in ENDINGS and bad == np.inf
        assert np.isnan(logprobs).all() != is_forbidden
        assert tokens.max() < VOCAB


@jax.jit
def three_likeliest(logits, wanted):
    return likeliest(logits, wanted, count=3, vocab_size=VOCAB)


def test_the_likeliest_tokens_are_those_of_the_model_alone():
    logits = np.stack([LOGITS, np.append(LOGITS[:VOCAB][::-1], LOGITS[VOCAB:])])
    tokens, logprobs = three_likeliest(logits, np.array([False, True]))
    for row in (0, 1):
        expected = np.log(reference(logits=logits[row]))
        order = np.argsort(-expected)[:3]
        np.testing.assert_array_equal(tokens[row], order)
        np.testing.assert_allclose(logprobs[row], expected[order], atol=1e-5)
    tokens, logprobs = three_likeliest(logits, np.array([False, False]))
    assert not np.any(tokens) and not np.any(logprobs)


@partial(jax.jit, static_argnames="vocab_size")
def sampled(logits, *how, vocab_size):
    return sample(logits, *how, vocab_size=vocab_size)


def drawn_once(logits: np.ndarray, temperature: float) -> tuple[np.ndarray, np.ndarray]:
    """A token of each row and its log-probability."""
    rows, vocab = logits.shape
    tokens, logprobs, _ = sampled(
        logits,
        keys_of(SEQUENCES[:rows]),
        rows_of([Sampling(temperature=temperature)] * rows),
        np.zeros((rows, 2, -(-vocab // 32)), np.uint32),
        np.full((rows, 1), -1, np.int32),
        vocab_size=vocab,
    )
    return np.asarray(tokens), np.asarray(logprobs)


VOCABULARIES = pytest.mark.parametrize("vocab", [7, 509, 3 * 512, 5 * 8 * 101])


@VOCABULARIES
def test_the_likeliest_token_is_found_in_any_block_and_of_equal_ones_the_first(vocab):
    rng, rows = np.random.default_rng(vocab), 64
    logits = rng.normal(0, 1, (rows, vocab)).astype(np.float32)
    first, second = np.sort(rng.integers(0, vocab, (2, rows)), axis=0)
    logits[np.arange(rows), first] = logits[np.arange(rows), second] = 9.0
    tokens, logprobs = drawn_once(logits, 0.0)
    np.testing.assert_array_equal(tokens, first)
    assert np.isfinite(logprobs).all()


@VOCABULARIES
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_logit_that_is_no_number_is_told_wherever_it_is(vocab, temperature, bad):
    """The largest of some numbers is no way to find it: XLA:CPU's may pass over a NaN."""
    rng = np.random.default_rng(vocab)
    at = np.unique(rng.integers(0, vocab, 256))
    logits = rng.normal(0, 1, (len(at), vocab)).astype(np.float32)
    logits[np.arange(len(at)), at] = bad
    assert np.isnan(drawn_once(logits, temperature)[1]).all()


def test_sequence_keys_differ_in_every_id():
    ids = list(product((0, 1), repeat=5))
    assert len({tuple(sequence_key(*each)) for each in ids}) == len(ids)
    assert sequence_key(0, 1).dtype == np.uint32 and sequence_key(0, 1).shape == (2,)
