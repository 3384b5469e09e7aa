"""Who is there before JAX is asked: all, or one sentence within the time."""

import hmac
import json
import pickle
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest
from several import free_port

from pat_jax.common.errors import UserError
from pat_jax.common.hosts import link, sockets, wire
from pat_jax.common.hosts.options import DistributedConfig
from pat_jax.common.hosts.place import TOKEN, Place, job_token
from pat_jax.common.hosts.roll_call import roll_call

STRAYS: Sequence[bytes | None] = [
    None,  # silent
    b"",
    b"GET / HTTP/1.1\r\nHost: a\r\n\r\n",
    b"\x16\x03\x01\x02\x00\x01" + bytes(500),
    b"x" * 100_000,
    b"[" * 5000 + b"\n",
    b'{"hello": "pat_jax roll call 1", "index": "1", "count": 2}\n',
    b'{"hello": "pat_jax roll call 1", "index": true, "count": 2}\n',
    b'{"index": 1, "host": "a", "prove": "", "proof": "00"}\n',
    b'{"index": 1, "host": "a", "prove": "", "proof": "\xff"}\n',
]


def outcomes(calls: Sequence[Callable[[], object]]) -> list[str]:
    """The sentence of each; empty where there is none."""

    def sentence(call: Callable[[], object]) -> str:
        try:
            call()
        except UserError as error:
            return str(error)
        return ""

    with ThreadPoolExecutor(len(calls)) as pool:
        return list(pool.map(sentence, calls))


def attend(place: Place, wait_s: float, token: bytes = b"") -> None:
    """Comes to the roll call, and goes again once all are there."""
    for peer in roll_call(place, wait_s, token)[1]:
        peer._connection.close()


def peers(address: str, count: int, token: bytes = b"") -> list[list[link.Peer]]:
    with ThreadPoolExecutor(count) as pool:
        call = [pool.submit(roll_call, Place(address, i, count), 20, token) for i in range(count)]
    return [one.result()[1] for one in call]


def called(address: str, indices: Sequence[int], count: int, wait_s: float) -> list[str]:
    return outcomes([lambda i=i: attend(Place(address, i, count), wait_s) for i in indices])


@contextmanager
def visits(port: int, strays: Sequence[bytes | None]) -> Iterator[None]:
    """Of strangers, again and again; each stays as long as it may."""
    is_over, kept = threading.Event(), []

    def come() -> None:
        while not is_over.is_set():
            for content in strays:
                try:
                    kept.append(one := socket.create_connection(("localhost", port), timeout=1))
                    if content is not None:
                        one.sendall(content)
                except OSError:
                    time.sleep(0.01)

    thread = threading.Thread(target=come)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()
        for one in kept:
            one.close()


def test_the_port_is_free_afterwards():
    """It is JAX's then."""
    address = f"localhost:{(port := free_port())}"
    assert called(address, [0, 1], 2, 20) == ["", ""]
    with socket.create_server(("localhost", port), reuse_port=False):
        pass


def test_who_does_not_come_is_named_to_all():
    address = f"localhost:{free_port()}"
    began = time.monotonic()
    fields = called(address, [0, 2], 4, 1)
    assert time.monotonic() - began < 10
    assert len(set(fields)) == 1 and fields[0].startswith(
        "processes 1, 3 of 4 did not come to " + address
    )


def test_no_first_process():
    (fields,) = called(address := f"localhost:{free_port()}", [1], 2, 0.5)
    assert fields.startswith(
        f"process 1 did not reach process 0 at {address} within 0.5 s (Connection"
    )


def test_a_name_that_nobody_has():
    fields = called("no-such-host.invalid:80", [0, 1], 2, 0.5)
    assert "process 0 cannot listen at no-such-host.invalid:80" in fields[0]
    assert "process 1 did not reach process 0 at no-such-host.invalid:80" in fields[1]


def test_a_port_that_is_taken():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        first, other = called(address, [0, 1], 2, 1)
    assert "another program has that port" in first and "within 1 s" in other


def test_processes_that_count_otherwise():
    address = f"localhost:{free_port()}"
    calls = [
        lambda: attend(Place(address, 0, 2), 20, b"token"),
        lambda: attend(Place(address, 1, 3), 20, b"token"),
    ]
    fields = outcomes(calls)
    assert fields[0] == fields[1] and "started as one of 3 and process 0 as one of 2" in fields[0]


def test_two_with_one_number():
    address = f"localhost:{free_port()}"
    fields = called(address, [0, 1, 1], 3, 1.5)
    assert sorted("is there already" in one for one in fields) == [False, False, True]
    assert "process 2 of 3 did not come" in fields[0]


@pytest.mark.parametrize("token", [b"", b"token"])
def test_who_was_there_talks_over_the_same_connection(monkeypatch, token: bytes):
    monkeypatch.setattr(sockets, "GREETING_S", 0.5)
    port = free_port()
    with visits(port, STRAYS):
        first, *others = peers(f"localhost:{port}", 3, token)
    assert [peer.index for peer in first] == [1, 2]
    assert [[peer.index for peer in other] for other in others] == [[0], [0]]
    message = link.Message("stop", content=7)
    for peer, other in zip(first, others, strict=True):
        peer.send(wire.to_bytes(message))
        assert other[0].receive() == message
    first[0]._key = bytes(32)
    first[0].send(wire.to_bytes(message))
    with pytest.raises(OSError, match="no process of this run"):
        others[0][0].receive()


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1"])
def test_a_port_is_open_where_it_is_needed_alone(host: str):
    with sockets.open_port(host) as listener:
        assert listener.getsockname()[0] in ("127.0.0.1", "::1")


def test_nothing_is_unpickled():
    ours, theirs = socket.socketpair()
    peer = link.Peer(link.Connection(ours.detach()), b"k" * 32, 1, "a")

    class Bomb:
        def __reduce__(self):
            return (pytest.fail, ("it was unpickled",))

    with link.Connection(theirs.detach()) as stranger:
        bomb = pickle.dumps(Bomb())
        stranger.send_bytes(bytes(32) + bomb)
        with pytest.raises(OSError, match="no process of this run"):
            peer.receive()
        stranger.send_bytes(hmac.digest(b"k" * 32, bomb, "sha256") + bomb)  # nor of a process
        with pytest.raises(OSError, match="cannot be read"):
            peer.receive()


OUTSIDERS = [
    {"hello": "pat_jax roll call 1", "index": 1, "count": 2},  # a job of an earlier version
    {"hello": "pat_jax roll call 2", "index": 1, "count": 3, "prove": "", "proof": "00"},
    {"index": 1, "count": 2, "prove": "", "proof": None},
]


def test_an_outsiders_line_neither_ends_the_first_process_nor_takes_a_place():
    port = free_port()
    lines = [json.dumps(fields).encode() + b"\n" for fields in OUTSIDERS]
    with visits(port, lines):
        assert called(f"localhost:{port}", [0, 1], 2, 20) == ["", ""]


@pytest.mark.parametrize("stale", [Place("", 1, 2), Place("", 1, 3)])
def test_a_process_of_another_job_is_ignored(stale: Place):
    address = f"localhost:{free_port()}"
    calls = [
        lambda: attend(stale._replace(coordinator=address), 3, b"another"),
        lambda: attend(Place(address, 0, 2), 20, b"this"),
        lambda: (time.sleep(1), attend(Place(address, 1, 2), 20, b"this")),
    ]
    other, first, ours = outcomes(calls)
    assert (first, ours) == ("", "")
    assert other.startswith("process 1 did not reach process 0") and TOKEN in other


def test_without_a_token_a_process_that_counts_otherwise_ends_nobody_but_itself():
    address = f"localhost:{free_port()}"
    calls = [
        lambda: attend(Place(address, 1, 3), 20),
        lambda: attend(Place(address, 0, 2), 20),
        lambda: (time.sleep(1), attend(Place(address, 1, 2), 20)),
    ]
    other, first, ours = outcomes(calls)
    assert (first, ours) == ("", "") and "started as one of 3 and process 0 as one of 2" in other


def test_the_token_is_never_sent(monkeypatch: pytest.MonkeyPatch):
    sent, send = [], sockets.send_fields
    monkeypatch.setattr(
        sockets, "send_fields", lambda to, **told: (sent.append(told), send(to, **told))
    )
    address = f"localhost:{free_port()}"
    outcomes([lambda i=i: attend(Place(address, i, 2), 20, b"secret-7") for i in (0, 1)])
    assert len(sent) >= 3 and "secret-7" not in json.dumps(sent)


@pytest.mark.parametrize(
    ("variables", "named"),
    [
        ({"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0"}, True),
        ({"PMIX_NAMESPACE": "7"}, True),
        ({"WORLD_SIZE": "2", "TORCHELASTIC_RUN_ID": "7"}, True),
        ({"WORLD_SIZE": "2", "SLURM_JOB_ID": "7"}, False),  # of one host's shell, perhaps
    ],
)
def test_a_job_has_the_token_of_its_launcher_and_of_its_user(variables: dict, named: bool):
    alone, by_hand = DistributedConfig(), DistributedConfig("a:1", 2, 0)
    assert bool(job_token(alone, variables)) == named and not job_token(by_hand, variables)
    ours = {TOKEN: "x"}
    assert len({job_token(by_hand, ours), job_token(by_hand, {TOKEN: "y"}), b""}) == 3
    assert (job_token(alone, variables | ours) != job_token(alone, ours)) == named
