"""Rewards over HTTP, asked of a server right here: up, down, slow, busy, wrong."""

import contextlib
import re
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from judges import Answer, begin, lengths

from pat_jax.common.errors import UserError
from pat_jax.rl.batches.types import Prompt
from pat_jax.rl.rewards.endpoint import RewardEndpoint
from pat_jax.rl.rewards.responses import Response, trial_responses
from pat_jax.rl.rewards.scorer import RewardScorer

pytestmark = pytest.mark.usefixtures("soon")


def test_a_group_is_one_question(serve):
    judge = serve(lambda question: (200, {"scores": [0.5, 2][: len(question["prompts"])]}))
    columns = {"answer": ["1", "1", "é\ud800"], "extra_info": [{"a": float("nan")}, None, [b"x"]]}
    with RewardScorer(judge.url, timeout=30.0) as scorer:
        assert scorer.score(["p", "p", "q"], ["a", "b", "c"], columns).tolist() == [0.5, 2, 0.5]
    first, second = sorted(judge.asked, key=lambda question: question["prompts"])
    assert first == {
        "prompts": ["p", "p"],
        "completions": ["a", "b"],
        "columns": {"answer": ["1", "1"], "extra_info": [{"a": None}, None]},
    }
    assert second["columns"] == {"answer": ["é\ud800"], "extra_info": [["b'x'"]]}


def test_null_does_not_apply_and_an_endpoint_adds_up_with_a_function(serve):
    judge = serve(lambda question: (200, {"scores": [1, None]}))
    columns = {"answer": ["1", "2"], "finish_reason": ["stop"] * 2}
    with RewardScorer(judge.url, "exact", weights=[10.0, 1.0], timeout=30.0) as scorer:
        assert scorer.score(["p", "p"], ["#1", "#2"], columns).tolist() == [11, 1]


def test_an_endpoint_that_is_down_costs_the_responses_of_the_call(serve):
    """… and is not asked for each of them again."""
    judge = serve(
        lambda question: (503, "") if "down" in question["completions"] else lengths(question)
    )
    with RewardScorer(judge.url, timeout=30.0, retries=1) as scorer:
        scoring = begin(scorer, ["p", "p", "q"], ["a", "down", "ccc"])
        np.testing.assert_array_equal(scoring.rewards(), [np.nan, np.nan, 3])
    assert len(judge.asked) == 3
    assert {str(failure.cause) for failure in scoring.failures.values()} == {"endpoint"}
    assert "answered 503 Service Unavailable, in each of 2 tries" in scoring.failures[0].text


@pytest.mark.parametrize(
    ("answer", "cause", "message"),
    [
        ((500, "trace"), "exception", r"answered 500 Internal .* \('trace'\), in each of 2"),
        ((422, {"detail": "no"}), "refused", "answered 422 Unprocessable .*detail"),
        ((301, ""), "refused", "answered 301 Moved Permanently"),
        ((200, "no JSON"), "wrong_result", r"broken JSON .* where {\"scores\": .* expected"),
        ((200, [1.0]), "wrong_result", r"answered '\[1.0\]' where"),
        ((200, {"scores": 1.0}), "wrong_result", "returned 1.0 where a list of 1 numbers"),
        ((200, {"scores": [1.0, 2.0, 3.0]}), "wrong_result", "returned 3 values where"),
        ((200, {"scores": ["good"]}), "not_a_number", "returned 'good'"),
        ((200, '{"scores": [NaN]}'), "not_a_number", "returned nan"),
    ],
    ids=str,
)
def test_only_the_response_that_upsets_an_endpoint_is_left_out(serve, answer, cause, message):
    judge = serve(
        lambda question: answer if "bad" in question["completions"] else lengths(question)
    )
    with RewardScorer(judge.url, timeout=30.0, retries=1) as scorer:
        scoring = begin(scorer, ["p", "p"], ["fine", "bad"])
        np.testing.assert_array_equal(scoring.rewards(), [4, np.nan])
    (failure,) = scoring.failures.values()
    assert str(failure.cause) == cause
    assert re.search(message, failure.text)


@contextlib.contextmanager
def saying(*pieces: bytes, times: int = 1) -> Iterator[str]:
    """The address of a server that says these to so many callers, and sees them hang up or hangs up."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def answer() -> None:
            for _ in range(times):
                connected, _ = server.accept()
                with connected, contextlib.suppress(OSError):
                    connected.recv(100_000)
                    for piece in pieces:
                        connected.sendall(piece)
                        time.sleep(0.05 if len(pieces) > 1 else 0)

        thread = threading.Thread(target=answer, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{server.getsockname()[1]}/"
        thread.join(30)
        assert not thread.is_alive()


def score_once(url: str, **options: Any) -> None:
    with RewardScorer(url, **options) as scorer:
        scorer.score(["p"], ["a"], {})


def test_an_answer_that_trickles_has_the_time_of_one_that_does_not_come():
    trickle = [b"HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\n", *[b"x"] * 500]
    message = r"1 timeout.*took longer than 0\.5 s"
    with saying(*trickle) as url, pytest.raises(UserError, match=message):
        score_once(url, timeout=0.5, retries=3)


def test_a_connection_that_breaks_off_is_tried_again():
    message = "1 endpoint.*broke the connection off .*, in each of 3 tries: expected an endpoint"
    broken = b"HTTP/1.1 200 OK\r\nContent-Length: 90\r\n\r\n{"
    with saying(broken, times=3) as url, pytest.raises(UserError, match=message):
        score_once(url, timeout=30.0, retries=2)


def test_closing_does_not_wait_for_answers(serve):
    is_asked, may_go_on = threading.Event(), threading.Event()

    def answer(question: dict[str, Any]) -> Answer:
        is_asked.set()
        may_go_on.wait(60)
        return 200, {}

    threads = set(threading.enumerate())
    judge, start = serve(answer), time.monotonic()
    scorer = RewardScorer(judge.url, timeout=1000.0, retries=100)
    begin(scorer, ["p", "q"], ["a", "b"])
    assert is_asked.wait(60)
    scorer.close()
    assert time.monotonic() - start < 30
    left = [
        one.name for one in set(threading.enumerate()) - threads if one.name.startswith("reward")
    ]
    assert left == []
    may_go_on.set()


def test_an_endpoint_that_is_down_is_found_when_it_is_tried_out():
    with socket.create_server(("127.0.0.1", 0)) as server:
        url = f"http://127.0.0.1:{server.getsockname()[1]}/score"
    made_up = trial_responses(Prompt(0, (), "p", {}), [])
    message = (
        "reward 'http://.*/score' could not be reached .*Connection refused.*, in each of 3 tries when "
        "it was tried out on 2 made-up responses; start the endpoint or correct it."
    )
    with (
        RewardScorer(url, timeout=30.0, retries=2) as scorer,
        pytest.raises(UserError, match=message),
    ):
        scorer.try_out(made_up, 2)


# --- when it is asked again, and what it is shown each time -----------------------------------------


def test_waits_grow_and_end(serve, monkeypatch):
    """With the waits that users have; here they take no time."""
    monkeypatch.undo()
    waits: list[float] = []
    judge = serve(lambda question: (503, ""))
    with contextlib.closing(RewardEndpoint(judge.url, 1, retries=8)) as endpoint:
        monkeypatch.setattr(endpoint._is_closed, "wait", lambda seconds: waits.append(seconds))
        outcome = endpoint.submit([Response("p", "a", {})], 30.0).result()
    assert outcome.failure is not None and outcome.failure.text.endswith("in each of 9 tries")
    assert waits == [0.5, 1, 2, 4, 8, 16, 30, 30] and len(judge.asked) == 9


@pytest.fixture
def elsewhere() -> Iterator[None]:
    """Where clocks do not show GMT."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TZ", "JST-9")
        time.tzset()
        yield
    time.tzset()


NOW = 1_700_000_000.25  # seconds since 1970: Tue, 14 Nov 2023 22:13:20 GMT


WAITS = {
    "7": 7,
    " 7 ": 7,
    "0": 0.5,  # our own wait is the least
    "3600": 20,  # the time of a call is the most
    "9" * 5000: 20,
    "Tue, 14 Nov 2023 22:13:29 GMT": 8.75,
    "Tuesday, 14-Nov-23 22:13:29 GMT": 8.75,
    "Tue Nov 14 22:13:29 2023": 8.75,
    "Tue, 14 Nov 2023 22:13:29 -0000": 8.75,
    "Wed, 15 Nov 2023 22:13:29 GMT": 20,
    "Fri, 31 Dec 9999 23:59:59 -2359": 20,
    "Tue, 14 Nov 2023 22:13:11 GMT": 0.5,
    **dict.fromkeys(("Tue, 99 Nov 2023 22:13:29 GMT", "Tue, 14 Nov 99999 22:13:29 GMT"), 0.5),
    **dict.fromkeys(
        ("Tue, 14 Nov 2023 22:13:29 +99999999999999", "Tue, 14 Nov 2023 99:99:99 GMT"), 0.5
    ),
    **dict.fromkeys(
        ("soon", "-7", "7.5", "²", "", "NaN", "inf", "1e400", ", ,,", "(", '"', "[2J"), 0.5
    ),
}


@pytest.mark.usefixtures("elsewhere")
@pytest.mark.parametrize("status", [429, 500, 502, 503])
def test_an_endpoint_says_when_it_is_asked_again(serve, monkeypatch, status: int):
    """With the waits that users have; here they take no time."""
    monkeypatch.undo()
    monkeypatch.setattr(time, "time", lambda: NOW)
    waits, told = list[float](), {}
    judge = serve(lambda question: lengths(question) if waits else (status, "", told))
    with contextlib.closing(RewardEndpoint(judge.url, 1, retries=1)) as endpoint:
        monkeypatch.setattr(endpoint._is_closed, "wait", lambda seconds: waits.append(seconds))
        for asked, waited in WAITS.items():
            waits.clear()
            told["Retry-After"] = asked.encode().decode("latin-1")
            outcome = endpoint.submit([Response("p", "abc", {})], 20.0).result()
            assert waits == [waited] and list(outcome.scores) == [3], asked
        waits.clear()
        told["Retry-After"] = "9" * 400
        endpoint.submit([Response("p", "abc", {})], 1e300).result()
    assert waits == [threading.TIMEOUT_MAX]


def test_a_token_is_shown_and_told_to_nobody(serve, caplog):
    """Not even where an endpoint says it again."""
    judge = serve(lambda question: (403, f"Bearer s3cret-t0ken is not known {judge.tokens}"))
    with RewardScorer(judge.url, timeout=30.0, token="s3cret-t0ken") as scorer:
        scoring = begin(scorer, ["p"], ["a"])
        with pytest.raises(UserError, match="answered 403") as error:
            scoring.rewards()
    assert set(judge.tokens) == {"Bearer s3cret-t0ken"}
    (failure,) = scoring.failures.values()
    assert "Bearer [token] is not known" in failure.text
    output = f"{error.value} {caplog.text} {failure} {scorer.functions[0].__dict__}"
    assert "s3cret" not in output


def test_without_a_token_none_is_shown(serve):
    judge = serve(lengths)
    with RewardScorer(judge.url, timeout=30.0) as scorer:
        scorer.score(["p"], ["a"], {})
    assert judge.tokens == [None]
