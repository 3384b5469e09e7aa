"""Sampling against float64 in NumPy: what is drawn, and how often, under every option."""

from functools import partial
from itertools import product

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from bursts import burst_output, retire
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
from pat_jax.engine.sequences.responses import Request, Responses
from pat_jax.engine.sequences.sampling import PLAIN, Sampling
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


# --- log-probabilities of the policy itself, beside those of the distribution drawn from ----------


@pytest.mark.parametrize("options", [*OPTIONS, {"temperature": 0.0}], ids=str)
def test_are_of_the_softmax_at_the_temperature_alone(options):
    """Every second row is plain, as in a batch of several requests."""
    options, rows = dict(options), len(SEQUENCES)
    is_early = options.pop("is_early", False)
    forbidden = np.full((rows, 2), -1, np.int32)
    forbidden[::2] = ENDINGS if is_early else -1
    tokens, logprobs, unfiltered = draw(
        np.broadcast_to(LOGITS, (rows, PADDED)),
        keys_of(SEQUENCES),
        rows_of([Sampling(**options), PLAIN] * (rows // 2)),
        seen_in(rows),
        forbidden,
    )
    for first, temperature in ((0, options.get("temperature", 1.0) or 1.0), (1, 1.0)):
        scaled = LOGITS[:VOCAB].astype(np.float64) / temperature
        expected = scaled - np.log(np.exp(scaled).sum())
        at = np.asarray(tokens)[first::2]
        np.testing.assert_allclose(unfiltered[first::2], expected[at], atol=2e-6, rtol=2e-6)
    np.testing.assert_array_equal(unfiltered[1::2], logprobs[1::2])
    is_filtered = not Sampling(**options).is_plain
    gap = np.abs(np.asarray(logprobs[::2]) - np.asarray(unfiltered[::2])).max()
    assert (gap > 1e-3) == (is_filtered or is_early)


def test_a_completion_has_them_where_they_are_others():
    sampling = [PLAIN, Sampling(top_p=0.9)]
    requests = [Request((3, 4), sequence_key(i), 8, each) for i, each in enumerate(sampling)]
    responses = Responses.of(requests, num_replicas=1, rows_per_replica=2)
    responses.table.add(np.arange(2), np.zeros(2, np.int64))
    generated = []
    for burst in range(2):
        tokens = np.arange(6, dtype=np.int32).reshape(2, 3) + 10 * burst
        logprobs = -tokens.astype(np.float32)
        emitted = np.array([3, 2], np.int32)
        retire(responses, burst_output(tokens, logprobs, emitted, np.array([True, True])))
        row = responses.table.row[1]
        generated.append(2 * logprobs[row, : emitted[row]])
    plain, filtered = (responses.completion(i, eos_ids=()) for i in range(2))
    assert plain.unfiltered_logprobs is None
    np.testing.assert_array_equal(filtered.unfiltered_logprobs, np.concatenate(generated))
    np.testing.assert_array_equal(2 * filtered.logprobs, filtered.unfiltered_logprobs)


def test_a_failed_token_is_in_neither():
    requests = [Request((3,), sequence_key(0), 8, Sampling(top_k=2))]
    responses = Responses.of(requests, num_replicas=1, rows_per_replica=1)
    responses.table.add(np.arange(1), np.zeros(1, np.int64))
    logprobs = np.array([[-1.0, np.nan]], np.float32)
    tokens = np.array([[5, 6]], np.int32)
    retire(responses, burst_output(tokens, logprobs, np.array([2]), np.array([False])))
    done = responses.completion(0, eos_ids=())
    assert done.error and done.logprobs.tolist() == [-1.0]
    assert jnp.asarray(done.unfiltered_logprobs).tolist() == [-2.0]
