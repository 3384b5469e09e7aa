"""A reward computed by another program over HTTP, such as a judge or a sandbox.

    POST {"prompts": [text, …], "completions": [text, …], "columns": {name: [value, …], …}}
    200  {"scores": [number or null, …]}

Knows requests, time limits, and which answers are worth a retry. Does not know connections
(`endpoint_http.py`), nor which responses one call is for (`function.py`); imports no jax.
"""

import base64
import contextlib
import json
import math
import re
import socket
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from datetime import UTC
from email.utils import parsedate_to_datetime
from http.client import HTTPConnection, HTTPResponse

from pat_jax.common.json_text import JsonError, parse_json
from pat_jax.rl.rewards.endpoint_http import LARGEST_ANSWER, Address, TooLongError
from pat_jax.rl.rewards.outcome import Cause, Failure, Outcome, read_scores
from pat_jax.rl.rewards.responses import Response

_CONNECT_SECONDS = 10.0
_FIRST_WAIT, _LONGEST_WAIT = 0.5, 30.0  # seconds between two tries; waits double each time
_EXCERPT_LENGTH = 200
_QUOTED = 2**16  # characters of an answer that are searched for the token before some are quoted
_TOO_MANY = 429
_INTERNAL = 500
_INSTEAD_OF_TOKEN = "[token]"
_SHAPE = '{"scores": [a number or null for each response]}'


class RewardEndpoint:
    """Calls the program at `url`, each call within its time limit.

    Args:
      num_calls: largest number of calls at a time.
      retries: further tries if the program cannot be reached or answers 429 or 5xx. Waits between
        tries grow, or follow its `Retry-After`. Each try has the time limit of a call.
      token: token sent as `Authorization: Bearer`, and never shown in messages; empty for none.

    Raises UserError if `url` is not an address.
    """

    def __init__(self, url: str, num_calls: int, retries: int, token: str = ""):
        self._address = Address.of(url)
        self._retries = retries
        self._secret = _Secret(token)
        self._headers = _HEADERS | ({"Authorization": f"Bearer {token}"} if token else {})
        self._threads = ThreadPoolExecutor(num_calls, thread_name_prefix="reward-endpoint")
        self._is_closed = threading.Event()
        self._lock = threading.Lock()
        self._open: set[socket.socket] = set()

    def close(self) -> None:
        """Cancels all calls. Responses without a score stay without one."""
        with self._lock:
            self._is_closed.set()
            for connected in self._open:
                _cut(connected)
        self._threads.shutdown(cancel_futures=True)

    def submit(self, responses: Sequence[Response], seconds: float) -> Future[Outcome]:
        """Starts one call for the responses; each of its tries ends after at most `seconds`."""
        return self._threads.submit(self._call, responses, seconds)

    def _call(self, responses: Sequence[Response], seconds: float) -> Outcome:
        start = time.perf_counter()
        body = _request(responses)
        outcome = self._try(body, len(responses), seconds)
        tries = 1
        while isinstance(outcome, _Passing) and tries <= self._retries:
            own = min(_FIRST_WAIT * 2 ** (tries - 1), _LONGEST_WAIT)
            most = min(seconds, threading.TIMEOUT_MAX)
            if self._is_closed.wait(max(own, min(outcome.asked_wait, most))):
                break
            outcome = self._try(body, len(responses), seconds)
            tries = tries + 1
        if isinstance(outcome, _Passing):
            again = f", in each of {tries} tries" if tries > 1 else ""
            outcome = Outcome(failure=Failure(outcome.cause, f"{outcome.text}{again}"))
        return replace(outcome, seconds=time.perf_counter() - start)

    def _try(self, body: bytes, count: int, seconds: float) -> "Outcome | _Passing":
        start = time.perf_counter()
        connection = self._address.connection(min(seconds, _CONNECT_SECONDS))
        with contextlib.closing(connection):
            try:
                connection.connect()
            except OSError as error:
                return _Passing(f"could not be reached ({error})")
            left = seconds - (time.perf_counter() - start)
            with self._limited(connection.sock, left) as is_over:
                outcome = self._exchange(connection, body, count)
                if is_over.is_set():
                    late = Failure(Cause.TIMEOUT, f"took longer than {seconds:g} s")
                    return Outcome(failure=late)
        return outcome

    def _exchange(
        self, connection: HTTPConnection, body: bytes, count: int
    ) -> "Outcome | _Passing":
        """Sends the request and reads the answer, unless the connection is cut before."""
        try:
            connection.request("POST", self._address.path, body, self._headers)
            answer = connection.getresponse()
            text = answer.read().decode(errors="replace")
        except TooLongError:
            what = f"answered more than {LARGEST_ANSWER:,} bytes"
            return Outcome(
                failure=Failure(Cause.WRONG_RESULT, f"{what} where {_SHAPE} was expected")
            )
        # Whatever the standard library raises on bytes that are no HTTP: it has no common class.
        except Exception as error:
            named = self._secret.hidden(" ".join(str(error).split())) or type(error).__name__
            return _Passing(f"broke the connection off ({named:.{_EXCERPT_LENGTH}})")
        return _read(answer, text, count, self._secret)

    @contextlib.contextmanager
    def _limited(self, connected: socket.socket, seconds: float) -> Iterator[threading.Event]:
        """Cuts the connection after `seconds`, even while its thread waits for it. Yields an event
        that is set if the time was over."""
        is_over = threading.Event()

        def end() -> None:
            is_over.set()
            _cut(connected)

        connected.settimeout(None)  # no limit on a single wait; the timer limits all of them
        watch = threading.Timer(min(max(seconds, 0.0), threading.TIMEOUT_MAX), end)
        watch.daemon = True
        with self._lock:
            self._open.add(connected)
            if self._is_closed.is_set():
                _cut(connected)
        watch.start()
        try:
            yield is_over
        finally:
            watch.cancel()
            with self._lock:
                self._open.discard(connected)


_HEADERS = {"Content-Type": "application/json", "Accept": "application/json"}
_HEADERS |= {"Connection": "close", "User-Agent": "pat_jax"}


@dataclass(frozen=True)
class _Passing:
    """The failure of one try, after which another try may succeed."""

    text: str
    cause: Cause = Cause.ENDPOINT
    asked_wait: float = 0.0  # least seconds to wait before another try, as the endpoint asks


def _cut(connected: socket.socket) -> None:
    with contextlib.suppress(OSError):  # it has ended by itself
        socket.socket.shutdown(connected, socket.SHUT_RDWR)  # below TLS, which would wait


def _request(responses: Sequence[Response]) -> bytes:
    names = responses[0].columns
    question = {
        "prompts": [one.prompt for one in responses],
        "completions": [one.completion for one in responses],
        "columns": {name: [_plain(one.columns[name]) for one in responses] for name in names},
    }
    return json.dumps(question).encode()


def _plain(value: object) -> object:
    """Returns a value for JSON: null for NaN and infinity, the text of values of other types."""
    if isinstance(value, Mapping):
        return {str(key): _plain(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(inner) for inner in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value if value is None or isinstance(value, bool | int | float | str) else str(value)


def _asked_wait(retry_after: str) -> float:
    """Returns the seconds that the header `Retry-After` asks for, as a number or a date, else 0.

    Reference: RFC 9110, section 10.2.3.
    """
    text = retry_after.strip()
    if text.isascii() and text.isdigit():
        return float(text)
    try:
        moment = parsedate_to_datetime(text)
        if moment.tzinfo is None:  # dates of HTTP are in GMT
            moment = moment.replace(tzinfo=UTC)
        return max(0.0, moment.timestamp() - time.time())
    except (ValueError, TypeError, IndexError, OverflowError):  # of what is not a date
        return 0.0


class _Secret:
    """Hides a token in messages: an answer may quote the token, and a message the answer.

    Args:
      token: the token, or empty if there is nothing to hide.
    """

    def __init__(self, token: str):
        content = token.encode("utf-8", "surrogatepass")
        encoded = [base64.b64encode(bytes(i) + content).decode()[2 * i :] for i in range(3)]
        # Cut where other bytes around the token would change the digits.
        forms = [form[bool(i) : -4] for i, form in enumerate(encoded) if len(content) > 5]
        forms += [form.translate(str.maketrans("+/", "-_")) for form in forms]
        escaped = r"\\{0,8}".join(map(_escaped, token))
        found = "|".join([escaped, content.hex(), *map(re.escape, forms)])
        self._found = re.compile(found if token else "(?!)", re.IGNORECASE)

    def hidden(self, text: str) -> str:
        """Returns the text without the token, even if it is escaped as in JSON, Python, URLs or
        HTML, also repeatedly, or encoded in base64 or hexadecimal digits."""
        return self._found.sub(_INSTEAD_OF_TOKEN, text)

    def hidden_inside(self, value: object) -> object:
        """Returns a JSON value with the token hidden in all of its texts."""
        if isinstance(value, str):
            return self.hidden(value)
        if isinstance(value, list):
            return [self.hidden_inside(inner) for inner in value]
        if isinstance(value, Mapping):
            return {self.hidden(key): self.hidden_inside(inner) for key, inner in value.items()}
        return value


def _escaped(character: str) -> str:
    """Returns a pattern that matches a character and its escaped forms."""
    code = ord(character)
    utf8 = character.encode("utf-8", "surrogatepass")
    units = character.encode("utf-16-be", "surrogatepass")
    as_units = "".join(
        rf"\\{{1,8}}u{{?0*{units[i : i + 2].hex()}}}?" for i in range(0, len(units), 2)
    )
    percent = "".join(f"%(?:25)*{one:02x}" for one in utf8)
    html = f"&(?:amp;)*#(?:x0*{code:x}|0*{code});?"
    return rf"(?:{re.escape(character)}|{as_units}|\\{{1,8}}x{code:02x}|{percent}|{html})"


def _read(answer: HTTPResponse, sentence: str, count: int, secret: _Secret) -> "Outcome | _Passing":
    """Returns the outcome for `count` responses from an answer, whose body is `sentence`."""
    text = secret.hidden(sentence[:_QUOTED])
    reason = secret.hidden(answer.reason)
    wait = _asked_wait(answer.getheader("Retry-After") or "")
    status = f"answered {answer.status} {reason:.{_EXCERPT_LENGTH}}"
    if answer.status == _INTERNAL:  # perhaps only one response causes it: others may be scored
        excerpt = f"{status} ({text!r:.{_EXCERPT_LENGTH}})"
        return _Passing(excerpt, Cause.EXCEPTION, wait)
    if answer.status == _TOO_MANY or answer.status > _INTERNAL:
        return _Passing(status, asked_wait=wait)
    if not 200 <= answer.status < 300:
        refusal = Failure(Cause.REFUSED, f"{status} ({text!r:.{_EXCERPT_LENGTH}})")
        return Outcome(failure=refusal)
    try:
        value = parse_json(sentence)
    except JsonError as error:
        wrong = f"answered {error}"
    else:
        if isinstance(value, Mapping) and "scores" in value:
            return read_scores(secret.hidden_inside(value["scores"]), count)
        wrong = f"answered {text!r:.60}"
    return Outcome(failure=Failure(Cause.WRONG_RESULT, f"{wrong} where {_SHAPE} was expected"))
