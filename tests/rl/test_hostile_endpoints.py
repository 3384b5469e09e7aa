"""Endpoints that answer what no server should: one sentence, in time, without the token and without what
would steer a terminal."""

import base64
import contextlib
import json
import re
import socket
import threading
import time
from collections.abc import Callable, Iterator
from urllib.parse import quote

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from pat_jax.common.errors import UserError
from pat_jax.rl.rewards import endpoint_http
from pat_jax.rl.rewards.endpoint import RewardEndpoint
from pat_jax.rl.rewards.outcome import Cause, Outcome
from pat_jax.rl.rewards.responses import Response
from pat_jax.rl.rewards.scorer import RewardScorer

TOKEN = 's3cret/t0"ken\\x'
SECONDS = 5.0
Ask = Callable[..., Outcome]


class Scripted:
    """Says the same bytes to everybody, once it has been asked."""

    def __init__(self) -> None:
        self.output = b""
        self.server = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self.server.getsockname()[1]}/"
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        while True:
            try:
                connected, _ = self.server.accept()
            except OSError:
                return
            with connected, contextlib.suppress(OSError):
                _read_question(connected)
                connected.sendall(self.output)


def _read_question(connected: socket.socket) -> None:
    """All of it: a connection that is closed before loses what was said."""
    read = b""
    while not (found := re.search(rb"Content-Length: (\d+)(?s:.*?)\r\n\r\n", read)) or len(
        read
    ) < found.end() + int(found[1]):
        if not (some := connected.recv(100_000)):
            return
        read += some


@pytest.fixture(scope="module")
def ask() -> Iterator[Ask]:
    """What becomes of a call that is answered so."""
    scripted = Scripted()
    with contextlib.closing(RewardEndpoint(scripted.url, 1, retries=0, token=TOKEN)) as endpoint:

        def ask(output: bytes, count: int = 1) -> Outcome:
            scripted.output, start = output, time.monotonic()
            outcome = endpoint.submit([Response("p", "a", {})] * count, SECONDS).result()
            assert time.monotonic() - start < 2 * SECONDS
            return outcome

        yield ask
    scripted.server.close()


def answer(body: bytes | str, *headers: str, status: str = "200 OK") -> bytes:
    content = body.encode() if isinstance(body, str) else body
    lines = [f"HTTP/1.1 {status}", *headers, "", ""]
    return "\r\n".join(lines).encode("latin-1") + content


CHUNKED = "Transfer-Encoding: chunked"
SCORED = '{"scores": [3]}'


BROKEN = "broke the connection off"
SAYINGS = [
    (answer("-1\r\nabcde\r\n0\r\n\r\n", CHUNKED), Cause.ENDPOINT, BROKEN),
    (answer("xyz\r\n", CHUNKED), Cause.ENDPOINT, BROKEN),
    (answer("f" * 40 + "\r\nab", CHUNKED), Cause.WRONG_RESULT, "answered more than"),
    (answer(f"{2**62:x}\r\nab", CHUNKED), Cause.WRONG_RESULT, "answered more than"),
    (answer(f"{2**40:x}\r\nab", CHUNKED), Cause.WRONG_RESULT, "answered more than"),
    (answer("", f"Content-Length: {2**62}"), Cause.WRONG_RESULT, "answered more than"),
    (answer("ab", f"Content-Length: {'9' * 5000}"), Cause.WRONG_RESULT, "broken JSON"),
    (answer("", "Content-Length: 99"), Cause.ENDPOINT, BROKEN),
    (answer(SCORED, "Content-Length: -7"), None, ""),
    (answer(SCORED, "Retry-After: " + "9" * 5000), None, ""),
    (answer("", *["A: b"] * 300), Cause.ENDPOINT, f"{BROKEN} .got more than"),
    (answer("", "A: " + "b" * 70_000), Cause.ENDPOINT, f"{BROKEN} .got more"),
    (b"HTTP/1.1 99999 OK\r\n\r\n", Cause.ENDPOINT, BROKEN),
    (b"\x00" * 100, Cause.ENDPOINT, BROKEN),
    (answer("", status="403 \x1b[31mred\x9b"), Cause.REFUSED, r"403 \\x1b\[31mred\\x9b"),
    (answer('{"scores": ["\\u001b[2J"]}'), None, r"returned '\\x1b\[2J'"),
    (answer(b"\x1b]0;x\x07", status="500 \x07"), Cause.EXCEPTION, r"500 \\x07 .'\\x1b\]0;x"),
    (answer("[" * 100_000), Cause.WRONG_RESULT, "nested more than 100 deep"),
    (answer('{"scores": [' + "9" * 5000 + "]}"), Cause.WRONG_RESULT, "integer of more than"),
    (answer('{"scores": [' + "9" * 4000 + "]}"), None, "returned inf, more than float32"),
    (answer('{"scores": [[[1]]]}'), None, r"returned \[\[1\]\]"),
    (answer('{"scores": [true]}'), None, ""),
]


@pytest.mark.parametrize(("output", "cause", "message"), SAYINGS, ids=range(len(SAYINGS)))
def test_what_no_server_should_say_is_one_sentence(ask: Ask, output, cause, message):
    outcome = ask(output)
    failures = [one for one in (outcome.failure, *outcome.scores) if one not in (None, 3.0, 1.0)]
    assert [getattr(one, "cause", None) for one in failures if one is outcome.failure] == (
        [cause] if cause else []
    )
    assert len(failures) == bool(message)
    for failure in failures:
        assert re.search(message, str(getattr(failure, "text", failure)))


@pytest.mark.parametrize("before", [answer("-1\r\n", CHUNKED), answer("")])
def test_an_answer_without_end_is_not_read_to_its_end(ask: Ask, monkeypatch, before):
    monkeypatch.setattr(endpoint_http, "LARGEST_ANSWER", 100_000)
    outcome = ask(before + b"x" * 5_000_000)
    assert outcome.failure is not None and outcome.failure.cause is Cause.WRONG_RESULT
    assert outcome.failure.text.startswith("answered more than")


TELLING = [
    answer(f"no {TOKEN}", status="500 Internal Server Error"),
    answer("", status=f"403 Bearer {TOKEN}"),
    answer("", status=f"503 Bearer {TOKEN}"),
    answer(json.dumps({"told": TOKEN}).replace("/", r"\/")),
    answer(json.dumps({"scores": [f"Bearer {TOKEN}"]})),
    answer(json.dumps({"scores": [{"a": [TOKEN], TOKEN: 1}]})),
    answer('{"scores": ["' + "".join(f"\\u{ord(c):04x}" for c in TOKEN) + '"]}'),
    answer(f"https://x/?key={quote(TOKEN, safe='')}"),
    f"HTTP/1.1 {TOKEN}\r\n\r\n".encode(),
    answer(f"{TOKEN}\r\n", CHUNKED),
    answer(TOKEN.replace("-", "\\u002d").replace("3", "\\u0033"), status="403 No"),
    answer(json.dumps(json.dumps(TOKEN)), status="403 No"),
    answer("".join(f"\\u{ord(c):04X}" for c in TOKEN), status="500 No"),
    answer("".join(f"%{ord(c):02X}" for c in TOKEN), status="403 No"),
    answer(quote(quote(TOKEN, safe=""), safe=""), status="403 No"),
    answer("".join(f"&#{ord(c)};" for c in TOKEN), status="403 No"),
    *(answer(base64.b64encode(b"x" * i + TOKEN.encode()), status="403 No") for i in range(3)),
    answer(TOKEN.encode().hex(), status="403 No"),
]


@pytest.mark.parametrize("output", TELLING, ids=range(len(TELLING)))
def test_no_message_has_the_token(ask: Ask, output):
    outcome = ask(output)
    told = repr((outcome.failure, outcome.scores))
    shown = told.replace(r"\\", "\\")
    for form in (TOKEN, json.dumps(TOKEN)[1:-1], quote(TOKEN, safe=""), "s3cret", "t0", "cret"):
        assert form not in told and form not in shown
    for form in ("\\u0073", "%73", "%2573", "&#115", "733363", "czNjcmV0", "MzY3JldA", "zM2NyZXQ"):
        assert form.lower() not in shown.lower()
    assert outcome.failure or outcome.scores


def test_a_token_in_the_numbers_changes_none():
    scripted = Scripted()
    scripted.output = answer('{"scores": [31]}')
    with contextlib.closing(RewardEndpoint(scripted.url, 1, retries=0, token="1")) as endpoint:
        outcome = endpoint.submit([Response("p", "a", {})], SECONDS).result()
    scripted.server.close()
    assert list(outcome.scores) == [31]


# What splits, decodes or resolves an address raises of each.
NO_ADDRESSES = [
    *(f"http://{'a' * 64}/", f"http://x.{'a' * 64}.com:80/", "http://a..b/", "http://.a/"),
    *("http://", "http://[::1/", "http://h:-1/", "http://h:x/", "http://h:99999999999/"),
    *("http://\x1b[2J/", "http://a b/", "http://ö/", "https://user:secret@host/"),
]


@pytest.mark.parametrize("url", NO_ADDRESSES)
def test_what_is_no_address_is_refused_before_anything_is_asked(url: str):
    message = r"option --reward is .*expected an address such as http://"
    with pytest.raises(UserError, match=message) as error:
        RewardScorer(url, timeout=1.0)
    assert str(error.value).isprintable()


@pytest.mark.parametrize(
    ("url", "host", "port"),
    [
        ("http://[::1]/a", "::1", 80),
        ("https://[fe80::abcd]/a", "fe80::abcd", 443),
        ("http://h:0/", "h", 0),
        ("https://h.", "h.", 443),
    ],
)
def test_an_address_is_taken_apart_once(url: str, host: str, port: int):
    found = endpoint_http.Address.of(url)
    connection = found.connection(1.0)
    assert (connection.host, connection.port) == (found.host, found.port) == (host, port)


PIECES = st.sampled_from(
    [
        *("\r\n", "\n", "0\r\n\r\n", "-5\r\n", "5\r\n", "5;x=\r\n", ": ", "\x00\x1b[31m"),
        *("Content-Length: 3", "Content-Length: -3", CHUNKED, "Connection: keep-alive"),
        *("Transfer-Encoding: gzip, chunked", "Retry-After: -1", "HTTP/1.1 200 OK\r\n"),
        *("HTTP/1.1 100 Continue\r\n\r\n", "HTTP/1.0 204 \r\n", "HTTP/1.1 429 x\x1b\r\n"),
        *("HTTP/1.1 418 \r\n", SCORED, '{"scores": null}', TOKEN),
    ]
)


@settings(
    max_examples=120, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    st.lists(st.one_of(PIECES, st.text(st.characters(max_codepoint=255), max_size=4)), max_size=9)
)
@example(["HTTP/1.1 200 OK\r\n", CHUNKED, "\r\n\r\n", "-5\r\n"])
def test_any_bytes_come_to_a_score_or_one_sentence(ask: Ask, pieces):
    outcome = ask("".join(pieces).encode("latin-1"))
    failures = [x for x in (outcome.failure, *outcome.scores) if x is not None and x != 3.0]
    assert failures or list(outcome.scores) == [3]
    for failure in failures:
        text = getattr(failure, "text", failure)
        assert isinstance(text, str) and len(text) < 600
        assert not re.search("[\x00-\x1f\x7f-\x9f]", text)
        assert TOKEN not in text
