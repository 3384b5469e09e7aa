"""What a request asks for, in the compiled engine: limits, stop tokens, likeliest tokens, penalties."""

from dataclasses import replace

import jax
import numpy as np
import pytest
from compilations import counted_compilations
from fakes import SETTINGS, subject
from hypothesis import given
from hypothesis import strategies as st

from pat_jax.engine.device.decode.sampling import remember
from pat_jax.engine.sequences.responses import Completion
from pat_jax.engine.sequences.sampling import MAX_STOP_IDS, Sampling
from pat_jax.engine.sequences.types import token_set
from tests.lossless import EOS_IDS, make_requests

SUBJECT, LENGTH = "kv2", 40
PADDED = 64  # tokens of a vocabulary
PATH = (1, 2, 8)


def generate(*samplings: Sampling, path=(1,), ignore_eos=False) -> list[Completion]:
    """One prompt and key for all, so that only the options make a difference."""
    first = make_requests(SETTINGS[SUBJECT], 0)[1]
    requests = [
        replace(first, sampling=each, max_new_tokens=LENGTH, ignore_eos=ignore_eos)
        for each in samplings
    ]
    planner = subject(SUBJECT).adaptive(path, "migrate", len(requests))
    return subject(SUBJECT).run(requests, planner)[0]


@pytest.fixture(scope="module")
def plain() -> np.ndarray:
    return generate(Sampling(), ignore_eos=True)[0].tokens


def test_a_stop_token_ends_a_response_and_belongs_to_it(plain):
    stops = [(int(plain[7]),), (60, int(plain[5]), 59), ()]
    done = generate(*(Sampling(stop_token_ids=ids) for ids in stops), ignore_eos=True)
    for each, ids in zip(done, stops, strict=True):
        ends = np.flatnonzero(np.isin(plain, ids))
        length = ends[0] + 1 if len(ends) else LENGTH
        np.testing.assert_array_equal(each.tokens, plain[:length])
        assert each.is_truncated == (len(ends) == 0)


def test_nothing_ends_a_response_before_its_least_length():
    often = Sampling(temperature=30.0)  # three of sixty-one tokens end it: soon
    soon, late, never = generate(
        often, replace(often, min_tokens=20), replace(often, min_tokens=LENGTH)
    )
    assert len(soon.tokens) < 20 <= len(late.tokens)
    assert not np.isin(late.tokens[:20], EOS_IDS).any()
    assert len(never.tokens) == LENGTH and never.is_truncated
    assert not np.isin(never.tokens, EOS_IDS).any()


def test_stop_tokens_wait_for_the_least_length(plain):
    (done,) = generate(Sampling(min_tokens=12, stop_token_ids=tuple({*plain[:8].tolist()})))
    assert len(done.tokens) >= 12 and not np.isin(done.tokens[:12], plain[:8]).any()


@pytest.mark.parametrize("path", [(1,), PATH])
def test_the_likeliest_tokens_come_with_each_token(path):
    asked = [0, 1, 3, 2]
    done = generate(*(Sampling(0.0, logprobs=n) for n in asked), path=path)
    assert done[0].top_tokens is done[0].top_logprobs is None
    for each, count in zip(done[1:], asked[1:], strict=True):
        assert each.top_tokens is not None and each.top_logprobs is not None
        assert each.top_tokens.shape == each.top_logprobs.shape == (len(each.tokens), count)
        # Greedy and without penalties, the token drawn is the likeliest one.
        np.testing.assert_array_equal(each.top_tokens[:, 0], each.tokens)
        np.testing.assert_allclose(each.top_logprobs[:, 0], each.logprobs, atol=1e-5)
        assert (np.diff(each.top_logprobs, axis=1) <= 0).all()


def test_a_strong_presence_penalty_says_every_token_once():
    """61 tokens, 40 to say: over bursts, compactions and switches none is forgotten."""
    some = [Sampling(presence_penalty=1e4), Sampling(0.0, presence_penalty=1e4)] * 2
    short = replace(Sampling(), stop_token_ids=tuple(range(8)))  # ends early: rows are compacted
    done = generate(*some, *[short] * 4, path=PATH, ignore_eos=True)
    for each in done[:4]:
        assert len(set(each.tokens.tolist())) == len(each.tokens) == LENGTH


def test_options_of_every_kind_compile_nothing():
    generate(Sampling())
    each = [
        Sampling(0.0),
        Sampling(0.7, top_k=5, top_p=0.9),
        Sampling(min_p=0.1, repetition_penalty=1.2),
        Sampling(presence_penalty=0.5, min_tokens=9, stop_token_ids=(5, 6)),
        Sampling(logprobs=3),
    ]
    with counted_compilations() as events:
        for i in range(len(each)):
            generate(*each[i:], path=PATH)
    assert events == []


# --- what it may ask for --------------------------------------------------------------------------


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
