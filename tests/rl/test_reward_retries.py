"""When an endpoint is asked again, and what it is shown each time."""

import contextlib
import threading
import time
from collections.abc import Iterator

import pytest
from judges import begin, lengths

from pat_jax.common.errors import UserError
from pat_jax.rl.rewards.endpoint import RewardEndpoint
from pat_jax.rl.rewards.responses import Response
from pat_jax.rl.rewards.scorer import RewardScorer

pytestmark = pytest.mark.usefixtures("soon")


@pytest.mark.parametrize("status", [429, 500, 502, 503])
def test_what_passes_is_waited_for(serve, status):
    judge = serve(lambda question: lengths(question) if len(judge.asked) > 2 else (status, ""))
    with RewardScorer(judge.url, timeout=30.0, retries=2) as scorer:
        assert scorer.score(["p", "p"], ["a", "bb"], {}).tolist() == [1, 2]
    assert len(judge.asked) == 3


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
        ("soon", "-7", "7.5", "²", "", "NaN", "inf", "1e400", ", ,,", "(", '"', "\x1b[2J"), 0.5
    ),
}


@pytest.mark.usefixtures("elsewhere")
@pytest.mark.parametrize("status", [429, 500, 503])
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
    said = f"{error.value} {caplog.text} {failure} {scorer.functions[0].__dict__}"
    assert "s3cret" not in said


def test_without_a_token_none_is_shown(serve):
    judge = serve(lengths)
    with RewardScorer(judge.url, timeout=30.0) as scorer:
        scorer.score(["p"], ["a"], {})
    assert judge.tokens == [None]
