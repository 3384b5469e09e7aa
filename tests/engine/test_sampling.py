"""Sampling against float64 in NumPy: by inversion, a grid of numbers must give the distribution."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pat_jax.engine.sampling import sample, sequence_key, uniform

VOCAB, PADDED, ROWS = 61, 64, 4096
LOGITS = np.random.default_rng(0).normal(0, 2, PADDED).astype(np.float32)
LOGITS[VOCAB:] = 50.0  # padding would win, were it not masked
GRID = (np.arange(ROWS) + 0.5) / ROWS


@jax.jit
def draw(logits, numbers, temperature, top_k, top_p):
    return sample(logits, numbers, temperature, top_k, top_p, vocab_size=VOCAB)


def drawn(temperature=1.0, top_k=0, top_p=1.0, *, logits=LOGITS, numbers=GRID):
    """Tokens and log-probabilities of one distribution for every number."""
    tokens, logprobs = draw(
        np.broadcast_to(logits, (ROWS, PADDED)),
        np.asarray(numbers, np.float32),
        np.full(ROWS, temperature, np.float32),
        np.full(ROWS, top_k, np.int32),
        np.full(ROWS, top_p, np.float32),
    )
    return np.asarray(tokens), np.asarray(logprobs)


def reference(temperature=1.0, top_k=0, top_p=1.0, logits=LOGITS) -> np.ndarray:
    """Probabilities, float64[vocab], by sorting and cutting in the plainest way."""
    scaled = logits[:VOCAB].astype(np.float64) / temperature
    probs = np.exp(scaled - scaled.max())
    if top_k:
        probs[np.argsort(-probs)[top_k:]] = 0.0
    probs /= probs.sum()
    order, mass, kept = np.argsort(-probs), 0.0, np.zeros(VOCAB)
    for token in order:
        if mass < top_p:
            kept[token] = probs[token]
            mass += probs[token]
    return kept / kept.sum()


OPTIONS = [
    {},
    {"temperature": 0.5},
    {"temperature": 3.0},
    {"top_k": 1},
    {"top_k": 5},
    {"top_k": 1000},
    {"top_p": 0.9},
    {"top_p": 0.01},
    {"temperature": 0.7, "top_k": 20, "top_p": 0.8},
    {"temperature": 2.0, "top_k": 10, "top_p": 0.95},
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_a_grid_of_numbers_gives_the_distribution(options):
    tokens, logprobs = drawn(**options)
    expected = reference(**options)
    counts = np.bincount(tokens, minlength=PADDED)[:VOCAB]
    # Each token has an interval of [0, 1) of its probability: at most one grid point off.
    np.testing.assert_allclose(counts / ROWS, expected, atol=1.01 / ROWS)
    np.testing.assert_allclose(logprobs, np.log(expected[tokens]), atol=1e-5)
    assert (np.diff(tokens) >= 0).all()  # in vocabulary order


def test_random_numbers_pass_a_chi_square_test():
    keys = np.stack([sequence_key(3, i) for i in range(ROWS)])
    tokens, _ = drawn(numbers=jax.jit(uniform)(keys, np.full(ROWS, 7, np.int32)))
    expected = reference() * ROWS
    is_large = expected > 5
    counts = np.bincount(tokens, minlength=PADDED)[:VOCAB].astype(float)
    counts = np.append(counts[is_large], counts[~is_large].sum())
    expected = np.append(expected[is_large], expected[~is_large].sum())
    freedom = len(counts) - 1
    statistic = ((counts - expected) ** 2 / expected).sum()
    # The mean is the number of degrees of freedom, the variance twice that.
    assert abs(statistic - freedom) < 4 * np.sqrt(2 * freedom)


@pytest.mark.parametrize("options", [{}, {"temperature": 50.0}, {"top_k": 63}, {"top_p": 0.9999}])
def test_padding_is_never_drawn(options):
    edge = 1 - 2.0**-23  # the largest number that `uniform` gives
    tokens, logprobs = drawn(**options, numbers=np.where(np.arange(ROWS) % 2, edge, 0.0))
    assert tokens.max() < VOCAB and np.isfinite(logprobs).all() and logprobs.min() > -50
    probs = reference(**options)
    assert tokens[0] == np.flatnonzero(probs)[0] and tokens[1] <= np.flatnonzero(probs)[-1]


def test_greedy_takes_the_likeliest_and_says_its_full_probability():
    tokens, logprobs = drawn(temperature=0.0, top_k=3, top_p=0.1)
    best = LOGITS[:VOCAB].argmax()
    assert set(tokens) == {best}
    np.testing.assert_allclose(logprobs, np.log(reference()[best]), atol=1e-5)


def test_rows_have_their_own_options():
    each = [(1.0, 0, 1.0), (0.0, 0, 1.0), (0.5, 4, 1.0), (1.0, 0, 0.7)]
    columns = [np.array([each[i % 4][j] for i in range(ROWS)]) for j in range(3)]
    tokens, logprobs = draw(
        np.broadcast_to(LOGITS, (ROWS, PADDED)),
        GRID.astype(np.float32),
        columns[0].astype(np.float32),
        columns[1].astype(np.int32),
        columns[2].astype(np.float32),
    )
    for i, (temperature, top_k, top_p) in enumerate(each):
        alone, alone_logprobs = drawn(temperature, top_k, top_p)
        np.testing.assert_array_equal(tokens[i::4], alone[i::4])
        np.testing.assert_allclose(logprobs[i::4], alone_logprobs[i::4], atol=1e-6)


def test_a_filtered_token_is_not_drawn_between_two_kept_ones():
    """Sums over thousands of filtered tokens go up and down in their last bit."""
    vocab, top_k = 4096, 8
    logits = np.random.default_rng(0).normal(0, 1, vocab).astype(np.float32)
    kept = np.sort(np.argsort(-logits)[:top_k])
    probs = np.exp(logits[kept].astype(np.float64))
    boundaries = np.cumsum(probs / probs.sum())[:-1]
    numbers = boundaries[:, None] + np.arange(-16, 16) * 2.0**-24
    rows = numbers.size
    tokens, logprobs = jax.jit(lambda *args: sample(*args, vocab_size=vocab))(
        np.broadcast_to(logits, (rows, vocab)),
        numbers.reshape(-1).astype(np.float32),
        np.ones(rows, np.float32),
        np.full(rows, top_k, np.int32),
        np.ones(rows, np.float32),
    )
    assert set(np.asarray(tokens).tolist()) <= set(kept.tolist())
    assert np.min(logprobs) > -20


def test_a_number_depends_on_key_and_position_alone():
    keys = np.stack([sequence_key(1, i) for i in range(6)])
    positions = np.arange(6, dtype=np.int32)
    numbers = np.asarray(uniform(jnp.asarray(keys), jnp.asarray(positions)))
    order = np.array([4, 0, 5, 2])
    shuffled = uniform(jnp.asarray(keys[order]), jnp.asarray(positions[order]))
    np.testing.assert_array_equal(shuffled, numbers[order])
    moved = np.asarray(uniform(jnp.asarray(keys), jnp.asarray(positions + 1)))
    other = np.asarray(uniform(jnp.asarray(keys[::-1].copy()), jnp.asarray(positions)))
    assert (moved != numbers).all() and (other != numbers).any()
    assert ((numbers >= 0) & (numbers < 1)).all()


def test_sequence_keys_differ_in_every_id():
    ids = [
        (s, t, i, p, k)
        for s in (0, 1)
        for t in (0, 1)
        for i in (0, 1)
        for p in (0, 1)
        for k in (0, 1)
    ]
    assert len({tuple(sequence_key(*each)) for each in ids}) == len(ids)
    assert sequence_key(0, 1).dtype == np.uint32 and sequence_key(0, 1).shape == (2,)
