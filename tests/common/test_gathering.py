"""What gathers while a thread is busy is done together."""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from pat_jax.common.gathering import Gathering


def test_what_comes_while_the_thread_is_busy_is_handed_over_together():
    taken, is_busy, may_go_on = [], threading.Event(), threading.Event()

    def take(some: list[int]) -> None:
        taken.append(some)
        is_busy.set()
        assert may_go_on.wait(30)

    with ThreadPoolExecutor(1) as thread:
        gathering = Gathering(thread, take)
        gathering.add(0)
        assert is_busy.wait(30)
        for number in range(1, 4):
            gathering.add(number)
        may_go_on.set()
        gathering.wait()
    assert taken == [[0], [1, 2, 3]]


def test_too_little_waits_for_more_or_for_the_end():
    taken: list[list[int]] = []
    with ThreadPoolExecutor(1) as thread:
        gathering = Gathering(thread, taken.append, is_enough=lambda some: sum(some) >= 10)
        for number in (3, 4, 5):
            assert taken == []
            gathering.add(number)
        gathering.wait()
        assert taken == [[3, 4, 5]]
        gathering.add(6)
        gathering.wait()
        gathering.wait()
    assert taken == [[3, 4, 5], [6]]


def test_an_error_is_raised_by_what_comes_next_and_by_waiting():
    def fail(some: list[int]) -> None:
        raise ValueError("no device")

    with ThreadPoolExecutor(1) as thread:
        gathering = Gathering(thread, fail)
        gathering.add(0)
        for again in (gathering.wait, lambda: gathering.add(1)):
            with pytest.raises(ValueError, match="no device"):
                again()
