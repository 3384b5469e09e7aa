"""Requests of all kinds through a session: batches, streams, and errors that stay with their own."""

from dataclasses import replace

import jax
import numpy as np
import pytest
from compilations import counted_compilations
from fakes import SETTINGS, made_up_latency, subject

from pat_jax.engine.device.decode.sampling import sequence_key
from pat_jax.engine.sequences.responses import Request
from pat_jax.engine.sequences.sampling import Sampling
from pat_jax.engine.session import WINDOW, Session
from pat_jax.planning.lengths.model import LengthModel
from pat_jax.planning.planner.planner import CostModelPlanner
from pat_jax.planning.planner.scripts import FixedLayout
from pat_jax.planning.types import Load, Plan, Split
from tests.lossless import make_requests

BENCH = "kv2"


@pytest.fixture
def session() -> Session:
    bench = subject(BENCH)
    planner = bench.static(1)
    layout = bench.engine.layouts[planner.split]
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
    planner = FixedLayout(bench.static(1).split)
    layout = bench.engine.layouts[planner.split]
    params = jax.device_put(damaged(name, value), layout.param_shardings(bench.policy))
    bench.engine.set_weights(params, layout)
    request = make_requests(SETTINGS[BENCH], 0)[1]
    (_, quiet), *_ = Session(bench.engine, planner).stream([request])
    assert quiet.error == (
        "request 0: the logits of token 1 of the response are not numbers (NaN)."
    )
