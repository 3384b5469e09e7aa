"""Work that gathers while a thread is busy, and that it then does together."""

from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future
from threading import Lock
from typing import Any, Generic, TypeVar

T = TypeVar("T")


def is_any(waiting: Sequence[Any]) -> bool:
    """Whether anything waits."""
    return bool(waiting)


class Gathering(Generic[T]):
    """Hands what has gathered to a function on one thread. What comes while the function runs, it
    gets together, the next time.

    Args:
      thread: an executor of one thread.
      do: takes what has gathered, at least one.
      is_enough: whether what waits is handed over before `ask` or `wait`.
    """

    def __init__(
        self,
        thread: Executor,
        do: Callable[[list[T]], None],
        is_enough: Callable[[Sequence[T]], bool] = is_any,
    ):
        self._thread, self._do, self._is_enough, self._lock = thread, do, is_enough, Lock()
        self._waiting: list[T] = []
        self._tasks: list[Future[None]] = []
        self._is_asked = False  # a task that has not begun takes along what comes

    def add(self, one: T) -> None:
        """Adds one, and returns at once. Any thread may call it.

        Raises whatever the function has raised before.
        """
        for task in [each for each in self._tasks if each.done()]:
            task.result()
        with self._lock:
            self._waiting.append(one)
            if not self._is_asked and self._is_enough(self._waiting):
                self._submit()

    def ask(self) -> None:
        """Hands over what waits, and returns at once."""
        with self._lock:
            if self._waiting and not self._is_asked:
                self._submit()

    def wait(self) -> None:
        """Waits until all that was added is done. Raises whatever the function has raised."""
        self.ask()
        for task in self._tasks:
            task.result()

    def _submit(self) -> None:
        self._tasks.append(self._thread.submit(self._take))
        self._is_asked = True

    def _take(self) -> None:
        with self._lock:
            waiting, self._waiting, self._is_asked = self._waiting, [], False
        self._do(waiting)
