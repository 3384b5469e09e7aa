"""Processes that talk: here several companies in one process, joined by real connections."""

import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import pytest

from pat_jax.common.errors import UserError
from pat_jax.common.hosts import link, together
from pat_jax.common.hosts.link import accept, connect, listen
from pat_jax.common.hosts.together import Company
from pat_jax.common.rules import OptionError


class Ends:
    """Exit codes of the processes that would have ended."""

    def __init__(self) -> None:
        self.codes: list[int] = []

    def end(self, code: int) -> None:
        self.codes.append(code)
        threading.Event().wait()  # what has ended does nothing more


_ends = Ends()  # of the test that runs; what an earlier one has started may end only now


@contextmanager
def companies(count: int) -> Iterator[list[Company]]:
    found = [Company(i, count) for i in range(count)]
    for one in found:
        one.end = _ends.end
    listener, address = listen("localhost")
    with ThreadPoolExecutor(count) as pool:
        first = pool.submit(accept, listener, count - 1)
        others = [pool.submit(connect, address, i) for i in range(1, count)]
        peers = [first.result(), *(other.result() for other in others)]
    for one, known in zip(found, peers, strict=True):
        one.meet(known)
    yield found
    for one in found:
        assert one._link is not None
        one._link.close()


def in_each(found: list[Company], do: Callable[[Company], Any]) -> list[Any]:
    """What each process gives or raises."""

    def guarded(one: Company) -> Any:
        try:
            return do(one)
        except BaseException as error:
            return error

    with ThreadPoolExecutor(len(found)) as pool:
        return list(pool.map(guarded, found))


def begin_in_each(found: list[Company], do: Callable[[Company], Any]) -> None:
    """Of processes of which one ends, the others would wait for ever."""
    for one in found:
        threading.Thread(target=do, args=(one,), daemon=True).start()


def wait_for(is_so: Callable[[], object]) -> None:
    until = time.monotonic() + 20
    while not is_so():
        assert time.monotonic() < until
        time.sleep(0.01)


@pytest.mark.parametrize("count", [2, 5])
def test_the_first_process_decides_for_all(count):
    with companies(count) as found:
        said = in_each(found, lambda one: one.agree("a plan", lambda: f"by {one.index}"))
        assert said == ["by 0"] * count
        said = in_each(found, lambda one: one.gather("numbers", one.index**2))
        assert said == [[i**2 for i in range(count)]] * count


def test_many_decisions_arrive_in_their_order():
    def decide(one: Company) -> list[int]:
        return [one.agree("a number", lambda i=i: i) for i in range(500)]

    with companies(3) as found:
        assert in_each(found, decide) == [list(range(500))] * 3


def test_a_mistake_of_the_first_is_everybodys():
    def make() -> None:
        raise OptionError("seed", 7, "another")

    with companies(2) as found:
        errors = in_each(found, lambda one: one.agree("options", make))
        assert {type(error) for error in errors} == {UserError}
        assert {str(error) for error in errors} == {"option --seed is 7: expected another."}
        # And they go on.
        assert in_each(found, lambda one: one.agree("x", lambda: 1)) == [1, 1]


def test_alone_nothing_is_asked_of_anybody():
    alone = Company()
    assert alone.agree("x", lambda: 3) == 3 and alone.gather("y", 4) == [4]
    with pytest.raises(OptionError):
        alone.agree("z", lambda: (_ for _ in ()).throw(OptionError("a", 1, "b")))
    alone.compare("w", 1)
    alone.leave()


def test_a_signal_to_one_stops_all_where_they_next_agree_and_may():
    class Stopped(Exception):
        pass

    def stop(number: int) -> None:
        raise Stopped(number)

    may = threading.Event()
    with companies(3) as found:
        for one in found:
            one.stop, one.may_stop = stop, may.is_set
        found[2].ask_to_stop(15)
        wait_for(lambda: found[0].stop_number is not None)
        assert in_each(found, lambda one: one.agree("x", lambda: 1)) == [1, 1, 1]
        may.set()
        assert in_each(found, lambda one: one.gather("y", 2)) == [[2, 2, 2]] * 3
        stopped = in_each(found, lambda one: one.agree("z", lambda: 1))
        assert [(type(each), each.args) for each in stopped] == [(Stopped, (15,))] * 3


@pytest.fixture
def ended(monkeypatch) -> list[int]:
    global _ends
    _ends = Ends()
    monkeypatch.setattr(together, "LAST_WORDS_S", 0.01)
    return _ends.codes


def test_processes_that_come_apart_end_with_a_sentence(ended, capfd):
    with companies(2) as found:
        names = ["a plan", "rewards"]
        begin_in_each(found, lambda one: one.agree(names[one.index], lambda: 1))
        wait_for(lambda: ended)
    assert "at 'rewards'" in (said := capfd.readouterr().err) and "'a plan'" in said


def test_another_decision_is_named(ended, capfd):
    with companies(3) as found:
        begin_in_each(found, lambda one: one.compare("burst", (64, one.index == 2)))
        wait_for(lambda: len(ended) == 3)
    assert "process 2 has come to another decision than process 0" in capfd.readouterr().err


def test_a_peer_that_is_gone_is_named(ended, capfd):
    with companies(2) as found:
        assert found[1]._link is not None
        (first,) = found[1]._link.peers
        with socket.fromfd(first._connection.fileno(), socket.AF_INET, socket.SOCK_STREAM) as line:
            line.shutdown(socket.SHUT_RDWR)
        wait_for(lambda: len(ended) == 2)
    said = capfd.readouterr().err
    assert all(f"error: process {i} on " in said for i in range(2)) and "--resume auto" in said


def test_a_peer_that_is_silent_is_given_up(ended, capfd, monkeypatch):
    monkeypatch.setattr(link, "SILENCE_S", 0.4)
    with companies(2) as found:
        assert found[1]._link is not None
        monkeypatch.setattr(found[1]._link, "send", lambda message: None)
        wait_for(lambda: ended)
    assert "has not been heard of for" in capfd.readouterr().err
