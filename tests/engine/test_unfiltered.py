"""Log-probabilities of the policy itself beside those of the distribution drawn from."""

import jax.numpy as jnp
import numpy as np
import pytest
from bursts import burst_output, retire
from sampling_cases import (
    ENDINGS,
    LOGITS,
    OPTIONS,
    PADDED,
    SEQUENCES,
    VOCAB,
    draw,
    keys_of,
    rows_of,
    seen_in,
)

from pat_jax.engine.device.decode.sampling import sequence_key
from pat_jax.engine.sequences.responses import Request, Responses
from pat_jax.engine.sequences.sampling import PLAIN, Sampling


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
