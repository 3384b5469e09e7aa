"""Several companies in one process, joined by real connections, that end without ending it."""

import math
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

from several import free_port

from pat_jax.common.hosts.place import Place
from pat_jax.common.hosts.roll_call import roll_call
from pat_jax.common.hosts.together import ProcessGroup


class Ends:
    """Exit codes of the processes that would have ended."""

    def __init__(self) -> None:
        self.codes: list[int] = []

    def end(self, code: int) -> None:
        self.codes.append(code)
        threading.Event().wait()  # what has ended does nothing more


_ends = Ends()  # of the test that runs; what an earlier one has started may end only now


def begin_to_end() -> list[int]:
    """The exit codes, from now on, of what ends."""
    global _ends
    _ends = Ends()
    return _ends.codes


@contextmanager
def companies(count: int, patience_s: float = math.inf) -> Iterator[list[ProcessGroup]]:
    found = [ProcessGroup(i, count, patience_s) for i in range(count)]
    for one in found:
        one.end = _ends.end
    address = f"localhost:{free_port()}"
    with ThreadPoolExecutor(count) as pool:
        called = [pool.submit(roll_call, Place(address, i, count), 20) for i in range(count)]
    for one, peers in zip(found, called, strict=True):
        one.meet(peers.result()[1])
    yield found
    for one in found:
        assert one._link is not None
        one._link.close()


def in_each(found: list[ProcessGroup], do: Callable[[ProcessGroup], Any]) -> list[Any]:
    """What each process gives or raises."""
    answers: dict[int, Any] = {}

    def answer(one: ProcessGroup) -> None:
        try:
            answers[one.index] = do(one)
        except BaseException as error:
            answers[one.index] = error

    begin_in_each(found, answer)
    # A process that ends does nothing more, and others may wait for it.
    wait_for(lambda: len(answers) == len(found), 120)
    return [answers[one.index] for one in found]


def begin_in_each(found: list[ProcessGroup], do: Callable[[ProcessGroup], Any]) -> None:
    """Of processes of which one ends, the others would wait for ever."""
    for one in found:
        threading.Thread(target=do, args=(one,), daemon=True).start()


def wait_for(is_so: Callable[[], object], seconds: float = 20) -> None:
    until = time.monotonic() + seconds
    while not is_so():
        assert time.monotonic() < until, f"exit codes of what has ended: {_ends.codes}"
        time.sleep(0.01)
