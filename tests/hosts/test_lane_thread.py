"""What gathers beside the main thread is done in the same portions, in the same order, everywhere."""

import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import pytest
from joined import companies, in_each, wait_for

from pat_jax.common.gathering import Gathers, all_if
from pat_jax.common.hosts.lane_thread import LaneThread
from pat_jax.common.hosts.together import ProcessGroup

WORK = range(20)


@pytest.mark.parametrize("count", [2, 3])
def test_every_process_does_the_same_work_together(ended, count):
    """Though work comes at other times and in another order in each."""
    done: list[list[tuple[str, list[int]]]] = [[] for _ in range(count)]

    def work(us: ProcessGroup) -> None:
        rng = np.random.default_rng(us.index)
        with LaneThread("lane", us) as lane:

            def gathering(name: str) -> Gathers[int]:
                def do(some: list[int]) -> None:
                    note(us, name, some)

                return lane.gathering(do, lambda one: one % 7)

            read, score = gathering("read"), gathering("score")
            for one in rng.permutation(WORK).tolist():
                time.sleep(rng.uniform(0, 0.004))
                read.add(one)
                score.add(one)
            read.wait()
            score.wait()
            lane.finish()

    def note(us: ProcessGroup, name: str, some: list[int]) -> None:
        time.sleep(0.003)
        done[us.index].append((name, sorted(one % 7 for one in some)))

    with companies(count) as found:
        assert in_each(found, work) == [None] * count
    assert all(one == done[0] for one in done)
    assert len(done[0]) > 2  # not all of it at once
    for name in ("read", "score"):
        assert sorted(x for of, some in done[0] if of == name for x in some) == sorted(
            one % 7 for one in WORK
        )
    assert ended == []


def test_where_the_first_process_waits_for_more_all_do(ended):
    done: dict[int, list[list[int]]] = {0: [], 1: []}

    def work(us: ProcessGroup) -> None:
        with LaneThread("lane", us) as lane:
            # Only the first process is asked.
            enough = 3 if us.is_first else 1
            choose = partial(all_if, lambda x: len(x) >= enough)
            gathering = lane.gathering(done[us.index].append, int, choose)
            for number in range(4):
                gathering.add(number)
            gathering.wait()
            lane.finish()

    with companies(2) as found:
        assert in_each(found, work) == [None, None]
    assert done[0] == done[1] and len(done[0][0]) >= 3


@pytest.mark.parametrize("count", [2, 3])
def test_what_is_left_is_the_same_in_every_process(ended, count):
    """Where the thread ends before all is done. All is done once or left."""
    done: list[list[list[int]]] = [[] for _ in range(count)]
    left: list[list[int]] = [[] for _ in range(count)]
    odd = range(21)

    def first_two(waiting: Sequence[int]) -> Sequence[int]:
        return sorted(range(len(waiting)), key=waiting.__getitem__)[: 2 * (len(waiting) > 1)]

    def work(us: ProcessGroup) -> None:
        rng = np.random.default_rng(us.index)

        def do(some: list[int]) -> None:
            time.sleep(0.01)
            done[us.index].append(some)

        with LaneThread("lane", us) as lane:
            gathering = lane.gathering(do, int, first_two)
            for one in rng.permutation(odd).tolist():
                time.sleep(rng.uniform(0, 0.002))
                gathering.add(one)
            lane.finish()
            left[us.index] = sorted(gathering.left())

    with companies(count) as found:
        assert in_each(found, work) == [None] * count
    assert all(one == done[0] for one in done) and all(one == left[0] for one in left)
    assert sorted([x for some in done[0] for x in some] + left[0]) == [*odd]
    assert left[0] and all(len(some) == 2 for some in done[0])
    assert ended == []


@pytest.mark.parametrize("broken", [0, 1])
def test_an_error_of_one_process_is_raised_there(ended, broken):
    """And its thread does not keep it from saying so, whatever the others do."""

    def work(us: ProcessGroup) -> None:
        def do(some: list[int]) -> None:
            if us.index == broken:
                raise ValueError("no device")
            threading.Event().wait(1)  # for the broken one's part of a program

        with LaneThread("lane", us) as lane:
            gathering = lane.gathering(do, int)
            gathering.add(0)
            gathering.wait()

    with companies(2) as found:
        answers = in_each(found, work)
    assert isinstance(answers[broken], ValueError) and answers[1 - broken] is None


def test_a_process_that_ends_does_not_wait_for_work_that_never_comes(ended):
    def follow(us: ProcessGroup) -> str:
        with LaneThread("lane", us) as lane:
            lane.gathering(print, int)
            us.told("lane").put((0, [1]))
            wait_for(lambda: us.told("lane").empty())
        return "ended"

    with companies(2) as found:
        assert in_each(found[1:], follow) == ["ended"]


def test_what_the_first_process_has_begun_all_complete(ended):
    """Where all end at the same point, as at a signal."""
    done, begun = [0, 0], threading.Event()

    def work(us: ProcessGroup) -> None:
        def do(some: list[int]) -> None:
            begun.set()
            if us.is_first:  # its program needs the other's part
                wait_for(lambda: done[1])
            done[us.index] += len(some)

        with LaneThread("lane", us) as lane:
            gathering = lane.gathering(do, int)
            gathering.add(0)
            if us.is_first:
                assert begun.wait(20)
            lane.finish()

    with companies(2) as found:
        assert in_each(found, work) == [None, None]
    assert done == [1, 1]


def test_threads_beside_are_progress_and_not_what_others_wait_for(ended):
    def at(us: ProcessGroup, do: Callable[[], Any]) -> Any:
        do()
        return us._at

    one = ProcessGroup()
    before = at(one, lambda: one.reach_point("a rollout"))
    with LaneThread("lane", one) as lane:
        gathering = lane.gathering(lambda some: one.reach_point("predict"), int)
        after = at(one, lambda: (gathering.add(0), gathering.wait()))
    assert (before.name, after.name) == ("a rollout",) * 2
    assert after.progress != before.progress
