"""Collects items for a thread that is busy. The thread then handles all of them in one call."""

from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future
from dataclasses import dataclass, field
from threading import Lock
from typing import Any, Generic, TypeVar

T = TypeVar("T")


def is_any(waiting: Sequence[Any]) -> bool:
    """Returns whether any item waits."""
    return bool(waiting)


@dataclass
class Gathering(Generic[T]):
    """Calls a function on one thread with the items that were added. Items that are added while the
    function runs wait; its next call gets them together.

    Attributes:
      thread: an executor of one thread.
      do: the function; it gets a list of at least one item.
      is_enough: gets the waiting items; if it returns True, `do` is called with them even before
        `ask` or `wait`.
    """

    thread: Executor
    do: Callable[[list[T]], None]
    is_enough: Callable[[Sequence[T]], bool] = is_any
    _lock: Lock = field(default_factory=Lock)
    _waiting: list[T] = field(default_factory=list)
    _tasks: list[Future[None]] = field(default_factory=list)
    _is_asked: bool = False  # a call is submitted, and takes all items added until it begins

    def add(self, one: T) -> None:
        """Adds an item, and returns at once. Any thread may call it.

        Raises whatever the function has raised before.
        """
        for task in [each for each in self._tasks if each.done()]:
            task.result()
        with self._lock:
            self._waiting.append(one)
            if not self._is_asked and self.is_enough(self._waiting):
                self._submit()

    def ask(self) -> None:
        """Submits a call with the items that wait, and returns at once."""
        with self._lock:
            if self._waiting and not self._is_asked:
                self._submit()

    def wait(self) -> None:
        """Waits until all items are done. Raises whatever the function has raised."""
        self.ask()
        for task in self._tasks:
            task.result()

    def _submit(self) -> None:
        self._tasks.append(self.thread.submit(self._take))
        self._is_asked = True

    def _take(self) -> None:
        with self._lock:
            waiting = self._waiting
            self._waiting = []
            self._is_asked = False
        self.do(waiting)
