"""What gathers while a thread is busy is done together."""

import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import pytest

from pat_jax.common.gathering import Gathering


class Busy:
    """Takes work, and is busy with it until it may go on."""

    def __init__(self):
        self.taken, self.is_busy = list[list[int]](), threading.Event()
        self.may_go_on = threading.Event()

    def __call__(self, some: list[int]) -> None:
        self.taken.append(some)
        self.is_busy.set()
        assert self.may_go_on.wait(30)


def test_what_comes_while_the_thread_is_busy_is_handed_over_together():
    work = Busy()
    with ThreadPoolExecutor(1) as thread:
        gathering = Gathering(thread, work)
        gathering.add(0)
        assert work.is_busy.wait(30)
        for number in range(1, 4):
            gathering.add(number)
        work.may_go_on.set()
        gathering.wait()
    assert work.taken == [[0], [1, 2, 3]]


def is_ten(some: Sequence[int]) -> bool:
    return sum(some) >= 10


def test_too_little_waits_for_more_or_for_the_end():
    taken: list[list[int]] = []
    with ThreadPoolExecutor(1) as thread:
        gathering = Gathering(thread, taken.append, is_ten)
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


def test_a_thread_that_takes_nothing_more_says_so():
    with ThreadPoolExecutor(1) as thread:
        gathering = Gathering(thread, print)
    with pytest.raises(RuntimeError, match="shutdown"):
        gathering.add(0)
