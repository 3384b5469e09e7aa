"""One distribution with padding, keys to draw with, and options that cut it in every way."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from scipy import stats

from pat_jax.engine.device.decode.gumbel import position_keys
from pat_jax.engine.device.decode.sampling import sample
from pat_jax.engine.sequences.sampling import Sampling
from pat_jax.engine.sequences.types import RowSampling, token_set
from tests.near_ties import Noise, noise_of

VOCAB, PADDED, ROWS = 61, 64, 4096
LOGITS = np.random.default_rng(0).normal(0, 2, PADDED).astype(np.float32)
LOGITS[VOCAB:] = 50.0  # padding would win, were it not masked
SEQUENCES = np.random.default_rng(1).integers(0, 2**32, (ROWS, 2), np.uint32)  # their keys
POSITION = 7
PROMPT, RESPONSE = [3, 7, 7, 50, int(LOGITS[:VOCAB].argmax())], [7, 9, 60, 33]
ENDINGS = [0, 9]
OPTIONS = [
    {},
    {"temperature": 0.5},
    {"top_k": 1},
    {"top_k": 5},
    {"top_p": 0.9},
    {"min_p": 0.1},
    {"temperature": 2.0, "min_p": 0.02},
    {"repetition_penalty": 1.3},
    {"presence_penalty": 2.5},
    {"is_early": True},
    {"is_early": True, "top_k": 4},
    {"temperature": 0.7, "top_k": 20, "top_p": 0.8},
    {"temperature": 2.0, "top_k": 10, "top_p": 0.95},
    {
        "temperature": 1.5,
        "top_k": 30,
        "top_p": 0.97,
        "min_p": 0.05,
        "repetition_penalty": 1.2,
        "presence_penalty": 0.5,
        "is_early": True,
    },
]


@jax.jit
def keys_of(sequences):
    """Of the noise of those sequences' tokens at `POSITION`."""
    return position_keys(sequences, jnp.full(len(sequences), POSITION))


def own_noise(sequences: np.ndarray, padded_vocab: int = PADDED) -> Noise:
    """The same noise, [sequences, ...], as the judge has it."""
    return Noise(*(x[:, 0] for x in noise_of(sequences, np.array([POSITION]), padded_vocab)))


@jax.jit
def draw(logits, keys, options, seen, forbidden):
    return sample(logits, keys, options, seen, forbidden, vocab_size=VOCAB)


def rows_of(options: Sequence[Sampling]) -> RowSampling:
    rows = RowSampling.empty(len(options))
    for row, each in enumerate(options):
        rows.put(row, each, prompt_length=0)
    return rows


def seen_in(rows: int, prompt: Sequence[int] = PROMPT, response: Sequence[int] = RESPONSE):
    sets = [token_set([*prompt, *response], PADDED), token_set(response, PADDED)]
    return np.broadcast_to(np.stack(sets)[None], (rows, 2, 2))


def chi_square(counts: np.ndarray, expected: np.ndarray) -> float:
    """How likely counts so far off are; what is expected less than five times counts as one token."""
    is_large = expected >= 5
    rest = counts[~is_large].sum(), expected[~is_large].sum()
    if rest[1] < 5:  # and if that is no more either, as part of the likeliest
        is_large[expected.argmax()] = False
        rest = counts[~is_large].sum(), expected[~is_large].sum()
    found, wanted = np.append(counts[is_large], rest[0]), np.append(expected[is_large], rest[1])
    return float(stats.chisquare(f_obs=found, f_exp=wanted).pvalue)
