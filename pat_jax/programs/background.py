"""Compiles layouts beside the run: on one thread, one layout after the other.

Knows programs. Does not know why a layout is wanted or what happens to it afterwards.
"""

import threading
import time
from collections.abc import Callable, Collection
from concurrent.futures import Future, ThreadPoolExecutor

from pat_jax.planning.types import Split
from pat_jax.programs.programs import Key, ProgramTable

THREAD_NAME = "background-compile"


class BackgroundCompiler:
    """One thread: most of compiling runs without Python's lock, and the cores have other work."""

    def __init__(self, programs: ProgramTable, only: Callable[[Key], bool] = lambda key: True):
        """
        Args:
          only: the programs to compile; others come when they are needed.
        """
        self.programs, self.only = programs, only
        self._pool = ThreadPoolExecutor(1, thread_name_prefix=THREAD_NAME)
        self._stopped = threading.Event()
        self._jobs: dict[Split, Future[float]] = {}

    def start(self, split: Split, beside: Collection[Split]) -> None:
        """Compiles the programs of `split` and of the switches between it and those `beside` it."""
        self._jobs[split] = self._pool.submit(self._compile, {split, *beside})

    @property
    def finished(self) -> set[Split]:
        """Layouts compiled and not taken yet."""
        return {split for split, job in self._jobs.items() if job.done()}

    def take(self, split: Split) -> float:
        """Seconds that a finished layout took.

        Raises:
          Exception: whatever compiling it raised.
        """
        return self._jobs.pop(split).result()

    def close(self) -> None:
        """Waits for the program that is being compiled, and begins no other."""
        self._stopped.set()
        self._pool.shutdown(wait=True, cancel_futures=True)

    def _compile(self, within: Collection[Split]) -> float:
        start = time.perf_counter()
        for key in filter(self.only, self.programs.missing(within)):
            if self._stopped.is_set():
                break
            self.programs.compile(key)
        return time.perf_counter() - start
