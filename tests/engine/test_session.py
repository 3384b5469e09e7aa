"""Requests of all kinds through a session: batches, streams, and errors that stay with their own."""

from dataclasses import replace

import jax
import numpy as np
import pytest
from compilations import counted_compilations
from fakes import SETTINGS, made_up_latency, subject
from hypothesis import given
from hypothesis import strategies as st

from pat_jax.engine.device.decode.sampling import remember, sequence_key
from pat_jax.engine.sequences.responses import Completion, Request
from pat_jax.engine.sequences.sampling import MAX_STOP_IDS, Sampling
from pat_jax.engine.sequences.types import token_set
from pat_jax.engine.session import WINDOW, Session
from pat_jax.planning.lengths.model import LengthModel
from pat_jax.planning.planner.planner import CostModelPlanner
from pat_jax.planning.types import Load, Plan, Split
from tests.lossless import EOS_IDS, make_requests

BENCH = "kv2"


@pytest.fixture
def session() -> Session:
    bench = subject(BENCH)
    planner = bench.static(1)
    layout = bench.engine.layouts[planner.first]
    bench.engine.set_weights(bench.weights(layout), layout)
    return Session(bench.engine, planner)


def test_more_requests_than_rows_say_what_they_say_alone(session: Session):
    requests = make_requests(SETTINGS[BENCH], 0)
    three_batches = [*requests, *requests[::-1], *requests[:5]]
    with counted_compilations() as compiled:
        done = dict(session.stream(iter(three_batches)))
    assert sorted(done) == list(range(len(three_batches))) and compiled == []
    for i, twin in [(i, 2 * len(requests) - 1 - i) for i in range(len(requests))]:
        assert done[i].tokens.tolist() == done[twin].tokens.tolist()
    for i in range(5):
        assert done[i].tokens.tolist() == done[2 * len(requests) + i].tokens.tolist()


def test_what_ends_early_comes_early(session: Session):
    request = make_requests(SETTINGS[BENCH], 0)[0]
    lengths = [40, 3, 20, 8]
    each = [replace(request, max_new_tokens=length, ignore_eos=True) for length in lengths]
    assert [i for i, _ in session.stream(each)] == [1, 3, 2, 0]


def test_nothing_is_read_before_it_is_needed(session: Session):
    request = replace(make_requests(SETTINGS[BENCH], 0)[0], max_new_tokens=2)
    taken, wanted = [], WINDOW * session.engine.capacity

    def requests():
        for i in range(2 * wanted):
            taken.append(i)
            yield request

    stream = session.stream(requests())
    next(stream)
    stream.close()  # the rest is not wanted: the cache is freed
    assert len(taken) == wanted
    assert len(dict(session.stream([request] * 3))) == 3


def test_samples_of_a_prompt_differ_and_come_back_with_the_seed(session: Session):
    hot = Sampling(temperature=2.0)

    def generated(seed: int) -> list[tuple[int, ...]]:
        requests = [
            Request(prompt, sequence_key(seed, i, sample), 20, hot)
            for i, prompt in enumerate([(3, 4), (5,)])
            for sample in range(3)
        ]
        done = dict(session.stream(requests))
        return [tuple(done[i].tokens.tolist()) for i in range(len(requests))]

    first = generated(5)
    assert first == generated(5) != generated(6)
    assert len(set(first)) == 6


def test_who_has_said_enough_stops_there(session: Session):
    request = make_requests(SETTINGS[BENCH], 0)[0]
    request = replace(request, max_new_tokens=40, ignore_eos=True)
    burst = session.engine.specs.functions.burst_steps
    heard: dict[int, int] = {}

    def watch(i: int, tokens: np.ndarray) -> bool:
        heard[i] = len(tokens)
        return i == 1 and len(tokens) >= 10

    done = dict(session.stream([request] * 3, watch=watch))
    assert len(done[0].tokens) == len(done[2].tokens) == 40
    assert 10 <= len(done[1].tokens) == heard[1] < 10 + burst
    assert done[1].tokens.tolist() == done[0].tokens[: len(done[1].tokens)].tolist()


def test_the_planner_learns_how_long_responses_become_while_they_come(session: Session):
    """One that its watcher has stopped has ended; one that is cut is known to be longer."""
    splits = tuple(session.engine.layouts)
    latency = made_up_latency(
        dict.fromkeys(splits, 0.1), dict.fromkeys(splits, 0.01), reshard=9, migrate_per_token=9
    )
    moments: list[int] = []

    class Listening(CostModelPlanner):
        def decide(self, load: Load, current: Split, options=()) -> Plan:
            moments.append(round(self.lengths.baseline.ended.sum()))
            return Plan(current, threshold=0)

    planner = Listening(splits, latency, LengthModel.empty(128))
    (request, *_) = make_requests(SETTINGS[BENCH], 0)
    requests = [
        replace(request, max_new_tokens=40, ignore_eos=True, sampling=Sampling())
        for _ in range(3 * session.engine.capacity)
    ]
    learning = Session(session.engine, planner)
    dict(learning.stream(requests, watch=lambda i, tokens: i % 2 == 0 and len(tokens) >= 8))
    assert 0 < moments[len(moments) // 2] < len(requests) / 2 and sorted(moments) == moments
    baseline = planner.lengths.baseline
    assert baseline.ended.sum() == baseline.cut.sum() == len(requests) / 2
    at = baseline.bins(np.array([40]))
    assert baseline.cut[at] == len(requests) / 2


BAD = [
    ({"tokens": ()}, "the prompt is empty: expected at least one token."),
    ({"tokens": (3, 61)}, "token id 61: expected ids from 0 to 60."),
    ({"tokens": (3, -1)}, "token id -1: expected"),
    ({"tokens": (3,) * 40_000}, "40000 tokens, but the model's context is 32768"),
    ({"tokens": (3,) * 60, "max_new_tokens": 9}, "60 tokens of prompt and up to 9 of response"),
    ({"max_new_tokens": 0}, "max_tokens is 0: expected an integer of at least 1."),
    ({"sampling": Sampling(min_tokens=99)}, "min_tokens is 99: expected at most max_tokens"),
    ({"sampling": Sampling(stop_token_ids=(61,))}, "stop_token_ids has 61: expected ids"),
    ({"sampling": Sampling(logprobs=4)}, "logprobs is 4: expected at most 3"),
]


def test_a_bad_request_gets_a_sentence_and_the_others_go_on(session: Session):
    good = make_requests(SETTINGS[BENCH], 0)[1]
    requests = [good]
    for wrong, _ in BAD:
        requests += [replace(good, **wrong), good]
    done = dict(session.stream(requests))
    assert sorted(done) == list(range(len(requests)))
    expected = done[0].tokens.tolist()
    assert expected
    for i, (_, words) in enumerate(BAD):
        failed, sound = done[2 * i + 1], done[2 * i + 2]
        assert failed.error.startswith(f"request {2 * i + 1}: ") and words in failed.error
        assert failed.error.endswith(".") and "\n" not in failed.error
        assert len(failed.tokens) == len(failed.logprobs) == 0
        assert sound.error == "" and sound.tokens.tolist() == expected


@pytest.mark.parametrize("asked", [None, 10**6, 40])
def test_the_longest_sequence_is_what_was_asked_for(session: Session, asked: int | None):
    fits = session.max_length
    limited = Session(session.engine, session.planner, max_length=asked)
    assert limited.max_length == min(fits, asked or fits)
    (request, *_) = make_requests(SETTINGS[BENCH], 0)
    most = limited.max_length - len(request.tokens)
    assert limited.complaint(replace(request, max_new_tokens=most)) == ""
    words = f"more than the {limited.max_length} that fit"
    assert words in limited.complaint(replace(request, max_new_tokens=most + 1))


def damaged(name: str, value: float):
    """The weights with one number of the parameter whose path has `name` replaced."""

    def change(path: tuple, x: np.ndarray) -> np.ndarray:
        x = np.array(x)
        if name in jax.tree_util.keystr(path):
            x.flat[0] = value
        return x

    return jax.tree_util.tree_map_with_path(change, subject(BENCH).params)


@pytest.mark.parametrize(
    ("name", "value"),
    [("['layers'][1]['attention']['query']", np.inf), ("['lm_head']", np.nan)],
)
def test_logits_that_are_no_numbers_name_the_request(name, value):
    bench = subject(BENCH)
    planner = bench.static(1)
    layout = bench.engine.layouts[planner.first]
    params = jax.device_put(damaged(name, value), layout.param_shardings(bench.policy))
    bench.engine.set_weights(params, layout)
    request = make_requests(SETTINGS[BENCH], 0)[1]
    (_, quiet), *_ = Session(bench.engine, planner).stream([request])
    assert quiet.error == (
        "request 0: the logits of token 1 of the response are not numbers (NaN)."
    )


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
