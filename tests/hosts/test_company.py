"""Processes that talk: they decide together, learn what the owners of some devices know, and end together."""

import pickle
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from fakes import FakeDevice
from hypothesis import example, given
from hypothesis import strategies as st
from joined import begin_in_each, companies, in_each, wait_for

from pat_jax.common import owners as module
from pat_jax.common.errors import UserError
from pat_jax.common.hosts import link
from pat_jax.common.hosts.link import Message
from pat_jax.common.hosts.together import ProcessGroup
from pat_jax.common.hosts.waiting import At
from pat_jax.common.hosts.wire import of_bytes, to_bytes
from pat_jax.common.owners import have_all, is_absent, known_to_all, owners
from pat_jax.common.rules import OptionError
from pat_jax.config.command_line import parse
from pat_jax.engine import agreed_planner
from pat_jax.engine.agreed_planner import AgreedPlanner
from pat_jax.planning.planner.scripts import FixedLayout
from pat_jax.planning.types import Load, Plan, Split
from pat_jax.rl.rewards.outcome import Cause, Failure


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


def test_a_peer_that_is_gone_before_they_meet_is_named(ended, capfd):
    groups = {n: ProcessGroup(0, 2) for n in range(20)}
    for n, group in groups.items():
        ours, theirs = socket.socketpair()
        theirs.close()
        group.end = lambda code, n=n: ended.append(n)
        group.meet([link.Peer(Connection(ours.detach()), b"key", 1, "there")])
    wait_for(lambda: set(ended) == set(groups))
    assert capfd.readouterr().err.count("error: process 1 on there ") == len(groups)


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


KEYS = st.none() | st.booleans() | st.integers() | st.text() | st.binary()
VALUES = st.recursive(
    KEYS | st.floats(allow_nan=False),
    lambda inner: (
        st.lists(inner)
        | st.lists(inner).map(tuple)
        | st.dictionaries(KEYS | st.tuples(KEYS), inner)
        | st.sets(KEYS)
        | st.frozensets(KEYS)
    ),
)


def typed(value: object) -> object:
    """With the type of each part: True is 1, and a tuple no list."""
    if isinstance(value, list | tuple):
        return type(value), [typed(one) for one in value]
    if isinstance(value, set | frozenset):
        return type(value), {typed(one) for one in value}
    if isinstance(value, dict):
        return dict, [(typed(key), typed(one)) for key, one in value.items()]
    return type(value), value


@given(VALUES)
@example({"tuple": [1], "dict": {}, "pat_jax.x:Y": None})
def test_plain_values_come_as_they_were(value: object):
    assert typed(of_bytes(to_bytes(value))) == typed(value)


@pytest.mark.parametrize(
    "value",
    [
        parse(["--preset", "demo", "--reward", "exact", "math"]),
        [Message("value", "plan", ("made", At("x", 3))), Split(2, 4), Path("/a b"), Cause.NONE],
        {(0, 1): Failure(Cause.TIMEOUT, "late"), "x": [float("inf"), 10**40, "\ud800"]},
    ],
)
def test_values_of_this_package_come_as_they_were(value: object):
    found = of_bytes(to_bytes(value))
    assert found == value and repr(found) == repr(value)


@pytest.mark.parametrize("dtype", ["bool", "int32", "uint64", "float16", "bfloat16", "float64"])
@pytest.mark.parametrize("shape", [(), (3,), (2, 0, 4), (2, 3)])
def test_arrays_come_bit_for_bit(dtype: str, shape: tuple[int, ...]):
    array = np.random.default_rng(0).normal(size=shape).astype(np.dtype(dtype))
    found = of_bytes(to_bytes([array]))[0]
    assert (found.dtype, found.shape, found.tobytes()) == (array.dtype, shape, array.tobytes())


def test_an_error_is_the_same_sentence():
    found = of_bytes(to_bytes(UserError("a: expected b.")))
    assert type(found) is UserError and str(found) == "a: expected b."


@pytest.mark.parametrize("value", [object(), len, UserError, np.array([{}]), 1j, range(3)])
def test_other_values_are_refused(value: object):
    with pytest.raises((TypeError, AttributeError)):
        to_bytes({"x": [value]})


@pytest.mark.parametrize(
    "content",
    [
        b'{"os:system": ["true"]}',
        b'{"builtins:eval": ["1"]}',
        b'{"pat_jax.common.files:os.system": ["true"]}',
        b'{"pat_jax.common.files:replace_text": ["/tmp/x", "y"]}',
        b'{"pat_jax.common.hosts.waiting:Wait": []}',
        b'{"pat_jax.common.hosts.none:A": []}',
        b'{"http:HTTPStatus": ["OK"]}',  # an enum, and a named tuple, of others
        b'{"urllib.parse:DefragResult": ["a", "b"]}',
        b'{"pat_jax.planning.types:Plan": [1]}',
        b'{"array": ["object", [1], {"bytes": "AAAAAAAAAAA="}]}',
        b'{"tuple": [], "list": []}',
        b"{}",
        b"\xff",
        b"\x80\x04",
    ],
)
def test_what_is_no_value_makes_none(content: bytes):
    with pytest.raises((ValueError, TypeError, LookupError, AttributeError, ImportError)):
        of_bytes(content)


class Hears(FixedLayout):
    def __init__(self):
        super().__init__(Split(1, 1))
        self.heard: list[object] = []

    def observe(self, outcome: Any) -> None:
        self.heard.append(outcome)


@pytest.mark.parametrize(("index", "heard"), [(0, ["a switch"]), (1, [])])
def test_who_decides_hears_what_came_of_it(monkeypatch, index: int, heard: list[object]):
    monkeypatch.setattr(agreed_planner, "process_group", lambda: ProcessGroup(index, 2))
    planner, outcome = Hears(), "a switch"
    AgreedPlanner(planner).observe(outcome)  # pyright: ignore[reportArgumentType]
    assert planner.heard == heard


def test_the_others_move_the_same_sequences(monkeypatch):
    """The plan of the first process comes to the others as a pickle, its replicas included."""

    class First(FixedLayout):
        def decide(self, load: Load, current: Split, options=()) -> Plan:
            plan = super().decide(load, current, options)
            return replace(plan, replica=options[0], reason=f"{load.running} in {current}")

    wire = SimpleNamespace(agree=lambda name, make: pickle.loads(pickle.dumps(make())))
    monkeypatch.setattr(agreed_planner, "process_group", lambda: wire)
    split, zeros = Split(2, 1), np.zeros(3, int)
    planner = AgreedPlanner(First(split))
    plan = planner.decide(Load(zeros, zeros, zeros, zeros), split, [np.array([0, 1, 0])])
    assert plan.replica is not None and plan.replica.tolist() == [0, 1, 0]
    assert plan.moves_from(split) and plan.reason == "3 in dp2tp1"
