"""What top-k and top-p keep, against sorting in NumPy.

The reference works in float64. Where a mass comes as near to top_p as float32 rounds, either side of it
is right; nothing else may differ.
"""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from pat_jax.engine.device.decode.sampling import NEG_INF, _floor
from pat_jax.engine.sequences.sampling import Sampling
from pat_jax.engine.sequences.types import RowSampling

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
