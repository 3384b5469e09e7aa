"""Our distributions against the logits processors of transformers (needs the `parity` extra)."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from sampling_cases import PADDED, SEQUENCES, VOCAB, draw, keys_of, own_noise, rows_of, seen_in

from pat_jax.engine.sequences.sampling import Sampling
from tests.near_ties import NEAR_TIE, perturbed

torch = pytest.importorskip("torch", reason="needs the `parity` extra")

from transformers import (  # noqa: E402 - they import torch
    LogitsProcessorList,
    MinNewTokensLengthLogitsProcessor,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

EOS, ROWS = [0, 9], 64
TOKENS = st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=10)
NOISE = own_noise(SEQUENCES[:ROWS])


def their_probabilities(logits: np.ndarray, text: list[int], num_prompt: int, sampling: Sampling):
    """float64[vocab], of the token that follows `text`."""
    processors = LogitsProcessorList(
        [
            RepetitionPenaltyLogitsProcessor(sampling.repetition_penalty),
            MinNewTokensLengthLogitsProcessor(num_prompt, sampling.min_tokens, EOS),
        ]
    )
    if sampling.temperature:
        processors.append(TemperatureLogitsWarper(sampling.temperature))
        processors.append(TopKLogitsWarper(sampling.top_k or VOCAB))
        processors.append(TopPLogitsWarper(sampling.top_p))
        processors.append(MinPLogitsWarper(sampling.min_p))
    ids, scores = torch.tensor([text]), torch.from_numpy(logits[None, :VOCAB].astype(np.float64))
    return torch.softmax(processors(ids, scores), dim=-1)[0].numpy()


@given(
    logits=arrays.arrays(np.float32, PADDED, elements=st.floats(-8, 8, width=16), unique=True),
    prompt=TOKENS,
    response=TOKENS,
    sampling=st.builds(
        Sampling,
        temperature=st.sampled_from([0.0, 0.3, 1.0, 1.7]),
        top_k=st.integers(0, VOCAB + 3),
        top_p=st.floats(0.05, 1.0),
        min_p=st.floats(0.0, 0.9),
        repetition_penalty=st.floats(0.5, 2.0),
        min_tokens=st.integers(0, 12),
    ),
)
def test_draws_follow_the_distribution_of_transformers(logits, prompt, response, sampling):
    expected = their_probabilities(logits, prompt + response, len(prompt), sampling)
    is_early = len(response) < sampling.min_tokens
    tokens, logprobs, _ = draw(
        np.broadcast_to(logits, (ROWS, PADDED)),
        keys_of(SEQUENCES[:ROWS]),
        rows_of([sampling] * ROWS),
        seen_in(ROWS, prompt, response),
        np.broadcast_to(np.array(EOS if is_early else [-1, -1], np.int32), (ROWS, 2)),
    )
    assert (expected[tokens] > 0).all()
    np.testing.assert_allclose(logprobs, np.log(expected[tokens]), atol=1e-4)
    if sampling.temperature == 0:
        assert set(np.asarray(tokens)) == {expected.argmax()}
        return
    with np.errstate(divide="ignore"):
        log_probs = np.broadcast_to(np.log(expected), (ROWS, VOCAB))
    inside = perturbed(log_probs, NOISE)[1][:, 0]  # of the one block
    assert (inside[np.arange(ROWS), tokens] > inside.max(axis=-1) - NEAR_TIE).all()
