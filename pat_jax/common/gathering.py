"""Work that gathers while a thread is busy, and that it then does together."""

from collections.abc import Callable, Hashable, Sequence
from concurrent.futures import Executor, Future
from threading import Lock
from typing import Any, Generic, Protocol, TypeVar, runtime_checkable

T = TypeVar("T")
T_contra = TypeVar("T_contra", contravariant=True)


@runtime_checkable
class Gathers(Protocol[T_contra]):
    """Work that gathers while a thread is busy, as `Gathering`."""

    def add(self, one: T_contra) -> None: ...

    def ask(self) -> None: ...

    def wait(self) -> None: ...

    def left(self) -> list[Any]: ...


@runtime_checkable
class Gatherer(Protocol):
    """A thread that does gathered work, with others such as itself in other processes."""

    def gathering(
        self,
        do: Callable[[list[T]], None],
        key: Callable[[T], Hashable],
        choose: Callable[[Sequence[T]], Sequence[int]] = ...,
    ) -> Gathers[T]:
        """Returns what hands gathered work to `do`. `key` names a piece of work, the same in every
        process; `choose` is that of `Gathering`."""
        ...


def is_any(waiting: Sequence[Any]) -> bool:
    """Whether anything waits."""
    return bool(waiting)


def everything(waiting: Sequence[Any]) -> Sequence[int]:
    """Chooses all that waits."""
    return range(len(waiting))


def all_if(is_enough: Callable[[Sequence[T]], bool], waiting: Sequence[T]) -> Sequence[int]:
    """Chooses all that waits once it is enough."""
    return range(len(waiting) if is_enough(waiting) else 0)


class Gathering(Generic[T]):
    """Hands what has gathered to a function on one thread. What comes while the function runs, it
    gets together, the next time.

    Args:
      thread: an executor of one thread.
      do: takes what has gathered, at least one.
      choose: which of what waits is handed over before `ask` or `wait`, by position. It is asked
        whenever the thread is free.
      has_ended: whether the thread has ended, so that what waits stays.
    """

    def __init__(
        self,
        thread: Executor,
        do: Callable[[list[T]], None],
        choose: Callable[[Sequence[T]], Sequence[int]] = everything,
        has_ended: Callable[[], bool] = lambda: False,
    ):
        self._thread, self._do, self._choose, self._lock = thread, do, choose, Lock()
        self._has_ended = has_ended
        self._waiting: list[T] = []
        self._tasks: list[Future[None]] = []
        self._is_due = False  # a task has not begun, and chooses when it does
        self._is_asked = False  # the next task takes all that waits

    def add(self, one: T) -> None:
        """Adds one, and returns at once. Any thread may call it.

        Raises whatever the function has raised before.
        """
        self._check()
        with self._lock:
            self._waiting.append(one)
            self._look()

    def ask(self) -> None:
        """Hands over what waits, and returns at once."""
        with self._lock:
            self._is_asked = bool(self._waiting)
            self._look()

    def wait(self) -> None:
        """Waits until all that was added is done. Raises whatever the function has raised."""
        self.ask()
        for task in self._tasks:
            task.result()

    def left(self) -> list[T]:
        """Returns what was added and is not done, once the thread has ended. Raises whatever the
        function has raised."""
        self._check()
        with self._lock:
            return [*self._waiting]

    def _check(self) -> None:
        for task in [each for each in self._tasks if each.done() and not each.cancelled()]:
            task.result()

    def _chosen(self) -> Sequence[int]:
        return range(len(self._waiting)) if self._is_asked else self._choose(self._waiting)

    def _look(self) -> None:
        if not self._is_due and self._chosen():
            try:
                self._tasks.append(self._thread.submit(self._take))
                self._is_due = True
            except RuntimeError:
                if not self._has_ended():
                    raise

    def _take(self) -> None:
        with self._lock:
            chosen, waiting = self._chosen(), self._waiting
            some, others = [waiting[i] for i in chosen], {*range(len(waiting))} - {*chosen}
            self._waiting = [waiting[i] for i in sorted(others)]
            self._is_due = self._is_asked = False
        if some:
            self._do(some)
        with self._lock:
            self._look()
