"""What a request may ask for."""

import pytest

from pat_jax.engine.sequences.sampling import MAX_STOP_IDS, Sampling


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
