"""A process whose main thread hangs, though it says that it is alive, ends all; a slow one does not."""

import gc
import sys
import threading
import time
from functools import partial
from types import FrameType, SimpleNamespace

import pytest
from joined import begin_in_each, companies, wait_for

from pat_jax.common.errors import UserError
from pat_jax.common.hosts import link, waiting
from pat_jax.common.hosts.options import DistributedConfig
from pat_jax.common.hosts.together import ProcessGroup
from pat_jax.common.hosts.waiting import At, Stall

PATIENCE_S = 2.0


@pytest.fixture(autouse=True)
def often(monkeypatch) -> None:
    """Heartbeats come well within that patience."""
    monkeypatch.setattr(link, "SILENCE_S", 2.0)


def hang(one: ProcessGroup) -> None:
    del one
    threading.Event().wait()


def test_who_never_comes_is_named_by_all_and_not_who_waits_for_it_too(ended, capfd):
    def do(one: ProcessGroup) -> None:
        one.agree("a plan", lambda: 1)
        if one.index == 2:
            hang(one)
        # The second process waits for the first, and longer than the first for the third.
        if one.index == 0:
            time.sleep(PATIENCE_S / 2)
        one.gather("rewards", one.index)

    with companies(3, PATIENCE_S) as found:
        begin_in_each(found, do)
        wait_for(lambda: len(ended) == 3)
    generated = capfd.readouterr().err
    assert set(ended) == {1} and generated.count("error: process 2 on ") == 3, generated
    assert "for 2 s, last at 'a plan', while process 0 on " in generated
    assert "waits for it at 'rewards'" in generated and "higher --distributed.patience" in generated
    assert "error: process 0 on " not in generated


def test_a_first_process_that_never_decides_is_named(ended, capfd):
    with companies(2, PATIENCE_S) as found:
        begin_in_each(found, lambda one: one.agree("room on disk", lambda: hang(one)))
        wait_for(lambda: len(ended) == 2)
    generated = capfd.readouterr().err
    assert generated.count("error: process 0 on ") == 2
    assert "last at 'room on disk', in pat_jax.common.hosts." in generated
    assert ", while process 1 on " in generated and "waits for it at 'room on disk'" in generated


def test_a_slow_one_that_goes_on_is_waited_for(ended, capfd, monkeypatch):
    monkeypatch.setattr(waiting, "LINE_S", 1.0)
    came: list[list[int]] = []

    def do(one: ProcessGroup) -> None:
        # Programs to compile, that the others have on their disks.
        for _ in range(9 * (one.index == 1)):
            time.sleep(PATIENCE_S / 4)
            one.reach_point("compiled programs")
        came.append(one.gather("compiled", one.index))

    with companies(3, PATIENCE_S) as found:
        begin_in_each(found, do)
        wait_for(lambda: len(came) == 3 or ended)
    assert came == [[0, 1, 2]] * 3 and not ended
    line = "waits at 'compiled' for process 1 on "
    assert (
        line in (generated := capfd.readouterr().err) and "last at 'compiled programs'" in generated
    )


def test_processes_that_all_come_to_nothing_new_end(ended, capfd):
    def do(one: ProcessGroup) -> None:
        one.agree("a plan", lambda: 1)
        hang(one)

    with companies(3, PATIENCE_S) as found:
        begin_in_each(found, do)
        wait_for(lambda: len(ended) == 3)
    generated = capfd.readouterr().err
    assert (
        generated.count("error: processes have come to nothing new for 2 s (process 0 on ") == 3
    ), generated
    assert generated.count("; process 2 on ") == 3 and "process 0 has ended" not in generated


def test_who_does_not_wait_for_its_devices_is_named(monkeypatch):
    clock = SimpleNamespace(s=0.0)
    monkeypatch.setattr(waiting, "time", SimpleNamespace(monotonic=lambda: clock.s))
    stall, at = Stall(100.0), At("a plan", 3, None, "pat_jax.run.loop:9 (iterate)", True)
    all_of = {f"process {i} on host{i}": at for i in range(9)}

    def generated(seconds: float, *changed: At) -> str:
        clock.s += seconds
        return stall.sentence({**all_of, **dict(zip(all_of, changed, strict=False))})

    hangs = at._replace(is_on_devices=False, place="pat_jax.run.files.folder:7 (open)")
    assert not generated(1, hangs) and not generated(99, hangs)
    assert generated(2, hangs).startswith(
        "process 0 on host0 has come to nothing new for 100 s, last at 'a plan', in pat_jax.run.files.folder:7 "
        "(open), while the others wait for their devices, and the run cannot go on; start all"
    )
    assert not generated(1, at.next("rewards"))
    assert not generated(1, at._replace(waits_for=2)) and not generated(
        101, at._replace(waits_for=2)
    )
    assert (
        not generated(101)
        and generated(101).count("process ") == 3
        and "; and 6 more), and the" in generated(0)
    )
    assert generated(0, hangs, hangs).count(" on host") == 2


def test_where_a_thread_is_in_our_code_and_whether_it_waits_for_devices():
    at = At("a plan").seen(threading.get_ident())
    assert "(seen)" in at.place and at.place.startswith("pat_jax.common.hosts.waiting:")
    assert not at.is_on_devices and str(at).startswith("last at 'a plan', in pat_jax")
    lock = threading.Lock()
    lock.acquire()
    on_devices = partial(eval, "lock.acquire()", {"__name__": "jax._src.array", "lock": lock})
    ours = {"__name__": "pat_jax.run.loop", "wait": on_devices}
    thread = threading.Thread(target=partial(eval, "wait()", ours), daemon=True)
    thread.start()
    wait_for(lambda: At().seen(thread.ident or 0).is_on_devices)
    assert At().seen(thread.ident or 0).place == "pat_jax.run.loop:1 (<module>)"
    lock.release()
    thread.join()
    assert At().seen(thread.ident or 0) == At()


def test_no_garbage_is_collected_while_a_thread_is_looked_at(monkeypatch):
    """In Python 3.11 that could stop the whole process, or read a frame that is gone."""
    look, was_enabled = sys._current_frames, list[bool]()

    def watched() -> dict[int, FrameType]:
        was_enabled.append(gc.isenabled())
        return look()

    monkeypatch.setattr(sys, "_current_frames", watched)
    assert At().seen(threading.get_ident()).place
    assert was_enabled == [False] and gc.isenabled()


def test_less_patience_than_heartbeats_need_is_refused():
    with pytest.raises(UserError, match=r"option --distributed\.patience is 5: expected an int"):
        DistributedConfig(patience=5)
