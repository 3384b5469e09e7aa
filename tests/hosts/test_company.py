"""Processes that talk: they decide together, learn what the owners of some devices know, and end together."""

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from fakes import FakeDevice
from joined import begin_in_each, companies, in_each, wait_for

from pat_jax.common import owners as module
from pat_jax.common.errors import UserError
from pat_jax.common.hosts import link
from pat_jax.common.hosts.together import ProcessGroup
from pat_jax.common.owners import have_all, is_absent, known_to_all, owners
from pat_jax.common.rules import OptionError


@pytest.mark.parametrize("count", [2, 5])
def test_the_first_process_decides_for_all(count):
    with companies(count) as found:
        generated = in_each(found, lambda one: one.agree("a plan", lambda: f"by {one.index}"))
        assert generated == ["by 0"] * count
        generated = in_each(found, lambda one: one.gather("numbers", one.index**2))
        assert generated == [[i**2 for i in range(count)]] * count


def test_many_decisions_arrive_in_their_order():
    def decide(one: ProcessGroup) -> list[int]:
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
    alone = ProcessGroup()
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


def test_processes_that_come_apart_end_with_a_sentence(ended, capfd):
    with companies(2) as found:
        names = ["a plan", "rewards"]
        begin_in_each(found, lambda one: one.agree(names[one.index], lambda: 1))
        wait_for(lambda: ended)
    assert "at 'rewards'" in (generated := capfd.readouterr().err) and "'a plan'" in generated


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
    generated = capfd.readouterr().err
    assert (
        all(f"error: process {i} on " in generated for i in range(2))
        and "--resume auto" in generated
    )


def test_a_peer_that_is_silent_is_given_up(ended, capfd, monkeypatch):
    monkeypatch.setattr(link, "SILENCE_S", 0.4)
    with companies(2) as found:
        assert found[1]._link is not None
        monkeypatch.setattr(found[1]._link, "send", lambda message: None)
        wait_for(lambda: ended)
    assert "has not been heard of for" in capfd.readouterr().err


DEVICES: list[Any] = [FakeDevice(i, i // 2) for i in range(8)]  # of four processes


@contextmanager
def each_is_itself(monkeypatch: pytest.MonkeyPatch, count: int) -> Iterator[Any]:
    """A function that calls another in each of `count` processes, which are threads here."""
    here = threading.local()
    monkeypatch.setattr(module, "process_group", lambda: here.us)
    with companies(count) as found:

        def call(do: Any) -> list[Any]:
            def as_one(one: ProcessGroup) -> Any:
                here.us = one
                return do(one.index)

            return in_each(found, as_one)

        yield call


def test_all_learn_what_the_first_owner_has_found(monkeypatch: pytest.MonkeyPatch):
    second = DEVICES[4:]
    with each_is_itself(monkeypatch, 4) as in_all:
        assert owners(second) == [2, 3]
        assert in_all(lambda i: is_absent(second)) == [True, True, False, False]
        found = in_all(lambda i: known_to_all("a column", second, f"by {i}" if i >= 2 else ""))
        assert found == ["by 2"] * 4
        assert in_all(lambda i: have_all(second)) == [False] * 4


def test_where_each_owns_some_nothing_is_told(monkeypatch: pytest.MonkeyPatch):
    with each_is_itself(monkeypatch, 4) as in_all:
        assert in_all(lambda i: have_all(DEVICES[1::2])) == [True] * 4
        assert in_all(lambda i: is_absent(DEVICES[1::2])) == [False] * 4
        # One after the other: nobody waits.
        for i in range(4):
            assert in_all(lambda j, i=i: known_to_all("x", DEVICES, j) if j == i else None)[i] == i


def test_alone_all_devices_are_here():
    assert not is_absent(DEVICES[6:]) and have_all(DEVICES[6:])
    assert known_to_all("x", DEVICES[6:], 3) == 3
    assert not is_absent([])
