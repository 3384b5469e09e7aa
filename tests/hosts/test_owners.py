"""What only the owners of some devices know, and how the others learn it."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from fakes import FakeDevice
from joined import companies, in_each

from pat_jax.common import owners as module
from pat_jax.common.hosts.together import ProcessGroup
from pat_jax.common.owners import have_all, is_absent, known_to_all, owners

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
