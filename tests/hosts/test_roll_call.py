"""Who is there before JAX is asked: all, or one sentence within the time."""

import json
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest

from pat_jax.common.errors import UserError
from pat_jax.common.hosts import link, sockets
from pat_jax.common.hosts.place import Place
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


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("localhost", 0))
        return free.getsockname()[1]


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


def called(address: str, indices: Sequence[int], count: int, wait_s: float) -> list[str]:
    return outcomes([lambda i=i: roll_call(Place(address, i, count), wait_s) for i in indices])


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
        lambda: roll_call(Place(address, 0, 2), 20),
        lambda: roll_call(Place(address, 1, 3), 20),
    ]
    fields = outcomes(calls)
    assert fields[0] == fields[1] and "started as one of 3 and process 0 as one of 2" in fields[0]


def test_two_with_one_number():
    address = f"localhost:{free_port()}"
    fields = called(address, [0, 1, 1], 3, 1.5)
    assert sorted("is there already" in one for one in fields) == [False, False, True]
    assert "process 2 of 3 did not come" in fields[0]


def test_strangers_disturb_no_roll_call(monkeypatch):
    monkeypatch.setattr(sockets, "GREETING_S", 0.5)
    port = free_port()
    with visits(port, STRAYS):
        assert called(f"localhost:{port}", [0, 1, 2], 3, 20) == [""] * 3


def test_strangers_disturb_no_meeting(monkeypatch):
    monkeypatch.setattr(sockets, "GREETING_S", 0.5)
    listener, address = link.listen("localhost")
    replayed = (
        json.dumps({"index": 1, "host": "a", "prove": "", "proof": "0" * 64}).encode() + b"\n"
    )
    with visits(address.port, [*STRAYS, replayed]), ThreadPoolExecutor(3) as pool:
        first = pool.submit(link.accept, listener, address.key, 2, 20)
        others = [pool.submit(link.connect, address, i) for i in (2, 1)]
        assert [peer.index for peer in first.result()] == [1, 2]
        assert [[peer.index for peer in other.result()] for other in others] == [[0], [0]]
        first.result()[0].send(pickled := link.pickle.dumps(link.Message("stop", content=7)))
        assert others[1].result()[0].receive() == link.pickle.loads(pickled)


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1"])
def test_a_port_is_open_where_it_is_needed_alone(host: str):
    listener, _ = link.listen(host)
    with listener:
        assert listener.getsockname()[0] in ("127.0.0.1", "::1")


def test_nothing_is_unpickled_of_a_stranger():
    ours, theirs = socket.socketpair()
    peer = link.Peer(link.Connection(ours.detach()), b"k" * 32, 1, "a")

    class Bomb:
        def __reduce__(self):
            return (pytest.fail, ("it was unpickled",))

    with link.Connection(theirs.detach()) as stranger:
        stranger.send_bytes(bytes(32) + link.pickle.dumps(Bomb()))
        with pytest.raises(OSError, match="no process of this run"):
            peer.receive()


def test_a_key_that_is_another_is_refused(monkeypatch):
    monkeypatch.setattr(sockets, "GREETING_S", 0.5)
    listener, address = link.listen("localhost")
    wrong = address._replace(key=bytes(32))
    calls = [lambda: link.accept(listener, address.key, 1, 0.6), lambda: link.connect(wrong, 1)]
    first, other = outcomes(calls)
    assert first.startswith("0 of 1 other processes") and "did not reach process 0" in other
