"""One thread beside the main thread that does gathered work, the same in every process.

A program of several processes must begin in all of them, on the devices that they share in the same
order. What gathers while the thread is busy depends on the clock. So the thread of the first
process takes what has gathered, and tells the others what that is. Theirs do the same, in the same
order. Does not know what the work is.
"""

import queue
from collections.abc import Callable, Hashable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import chain
from threading import Condition
from typing import Generic, Self, TypeVar
from weakref import WeakValueDictionary

from pat_jax.common.gathering import Gathering, Gathers, everything
from pat_jax.common.hosts.together import ProcessGroup, process_group

T = TypeVar("T")
LOOK_S = 0.2  # between two looks whether the thread is to end


class LaneThread:
    """One thread for the work of several `gathering`s.

    Args:
      name: the same in every process, and of no other thread that is open.
    """

    def __init__(self, name: str, us: ProcessGroup | None = None):
        self._us, self._name, self._count = us or process_group(), name, 0
        self._changed, self._is_over = Condition(), False
        self._followed = WeakValueDictionary[int, _Followed]()
        make = self._us.begin_beside
        self._pool = ThreadPoolExecutor(1, thread_name_prefix=name, initializer=make)
        self._following: Future[None] | None = None
        if not self._us.is_first:
            self._following = self._pool.submit(self._follow)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def gathering(
        self,
        do: Callable[[list[T]], None],
        key: Callable[[T], Hashable],
        choose: Callable[[Sequence[T]], Sequence[int]] = everything,
    ) -> Gathers[T]:
        """Returns what hands gathered work to `do` on this thread. All processes must call this in
        the same order, and add the same work, in any order.

        Args:
          key: returns what names a piece of work in every process.
          choose: as in `Gathering`; the first process chooses.
        """
        number, self._count = self._count, self._count + 1
        if self._us.is_alone:
            return Gathering(self._pool, do, choose, lambda: self._is_over)
        if not self._us.is_first:
            followed = _Followed(do, key, self._changed)
            with self._changed:
                self._followed[number] = followed
                self._changed.notify_all()
            return followed

        def told(some: list[T]) -> None:
            self._us.tell(self._name, (number, [key(one) for one in some]))
            do(some)

        return Gathering(self._pool, told, choose, lambda: self._is_over)

    def finish(self) -> None:
        """Ends the thread after all work that any process has begun. All processes must call it."""
        if self._following is None:
            self._is_over = True
            self._pool.shutdown(cancel_futures=True)
            self._us.tell(self._name, None)
        else:
            self._following.exception()  # the gatherings raise it

    def close(self) -> None:
        """Ends the thread after the work that it does now. With several processes returns at once,
        since the others may not do their part of it."""
        with self._changed:
            self._is_over = True
            self._changed.notify_all()
        self._pool.shutdown(wait=self._us.is_alone, cancel_futures=True)

    def _follow(self) -> None:
        told = self._us.told(self._name)
        while not self._is_over:
            try:
                message = told.get(timeout=LOOK_S)
            except queue.Empty:
                continue
            if message is None:
                return
            if (followed := self._due(*message)) is None:
                return
            followed.take(message[1])

    def _due(self, number: int, keys: Sequence[Hashable]) -> "_Followed | None":
        """Waits until all work of these keys is there. Returns None if the thread is to end."""

        def is_there() -> bool:
            followed = self._followed.get(number)
            return self._is_over or (followed is not None and followed.has(keys))

        with self._changed:
            self._changed.wait_for(is_there)
            return None if self._is_over else self._followed[number]


class _Followed(Generic[T]):
    """Work that gathers in a process which does it when the first process says so."""

    def __init__(
        self,
        do: Callable[[list[T]], None],
        key: Callable[[T], Hashable],
        changed: Condition,
    ):
        self._do, self._key, self._changed = do, key, changed
        self._waiting: dict[Hashable, list[T]] = {}  # equal keys stand for equal work
        self._missing = 0  # added and not done
        self._error: BaseException | None = None

    def add(self, one: T) -> None:
        """Adds one, and returns at once. Raises whatever the function has raised before."""
        with self._changed:
            self._check()
            self._waiting.setdefault(self._key(one), []).append(one)
            self._missing += 1
            self._changed.notify_all()

    def ask(self) -> None:
        """The first process asks."""

    def wait(self) -> None:
        """Waits until all that was added is done. Raises whatever the function has raised."""
        with self._changed:
            self._changed.wait_for(lambda: self._error or not self._missing)
            self._check()

    def left(self) -> list[T]:
        """Returns what was added and is not done, once the thread has ended. Raises whatever the
        function has raised."""
        with self._changed:
            self._check()
            return list(chain.from_iterable(self._waiting.values()))

    def has(self, keys: Sequence[Hashable]) -> bool:
        """Whether work of all these keys waits."""
        return all(len(self._waiting.get(key, ())) >= keys.count(key) for key in {*keys})

    def take(self, keys: Sequence[Hashable]) -> None:
        """Does the work of these keys, which waits."""
        with self._changed:
            some = [self._waiting[key].pop(0) for key in keys]
        try:
            self._do(some)
        except BaseException as error:
            with self._changed:
                self._error = error
                self._changed.notify_all()
            raise
        with self._changed:
            self._missing -= len(some)
            self._changed.notify_all()

    def _check(self) -> None:
        if self._error is not None:
            raise self._error
