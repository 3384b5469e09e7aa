"""What a request may ask for, and which tokens have been seen, on the host and on the devices."""

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pat_jax.engine.device.decode.sampling import remember
from pat_jax.engine.sequences.sampling import MAX_STOP_IDS, Sampling
from pat_jax.engine.sequences.types import token_set

PADDED = 64


@given(
    st.lists(st.lists(st.integers(0, PADDED - 1), max_size=12), min_size=5, max_size=5),
    st.lists(st.lists(st.integers(0, PADDED - 1), max_size=12), min_size=5, max_size=5),
    st.lists(st.tuples(*[st.integers(0, PADDED - 1)] * 5), max_size=6),
    st.lists(st.booleans(), min_size=5, max_size=5),
)
def test_what_the_device_remembers_is_what_the_host_would_send(prompts, responses, steps, running):
    host = [
        np.stack([token_set([*p, *r], PADDED), token_set(r, PADDED)])
        for p, r in zip(prompts, responses, strict=True)
    ]
    seen, remembers = np.stack(host), jax.jit(remember)
    for tokens in steps:
        seen = remembers(seen, np.array(tokens, np.int32)[:, None], np.array(running)[:, None])
        for row in np.flatnonzero(running):
            responses[row] = [*responses[row], tokens[row]]
    for row, (prompt, response) in enumerate(zip(prompts, responses, strict=True)):
        for part, expected in enumerate(({*prompt, *response}, {*response})):
            words = np.asarray(seen)[row, part]
            assert {t for t in range(PADDED) if words[t // 32] >> (t % 32) & 1} == expected


@pytest.mark.parametrize(
    ("field", "bad"),
    [
        ("temperature", [-1, 1e-9, float("nan"), float("inf"), "hot", True, None]),
        ("top_k", [-1, 2.5, 2**31, "5"]),
        ("top_p", [0, -0.1, 1.5, float("nan")]),
        ("min_p", [-0.1, 1.1]),
        ("repetition_penalty", [0, -1, 1e9]),
        ("presence_penalty", [float("inf"), "1"]),
        ("min_tokens", [-1, 0.5]),
        ("stop_token_ids", [3, [3], (-1,), (1.0,), tuple(range(MAX_STOP_IDS + 1))]),
        ("logprobs", [-1, True]),
    ],
)
def test_a_value_that_cannot_be_is_refused_in_one_sentence(field, bad):
    for value in bad:
        with pytest.raises(ValueError) as caught:
            Sampling(**{field: value})
        message = str(caught.value)
        assert message.startswith(f"{field} is {value!r}: expected ")
        assert message.endswith(".") and "\n" not in message
