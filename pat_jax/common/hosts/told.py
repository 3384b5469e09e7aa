"""What other processes have told this one, by who listens for it."""

import queue
import threading
from collections.abc import Callable
from typing import Any

Listener = Callable[[Any], None]


class Told:
    """Values that wait under a name until somebody takes or hears them, in the order they came."""

    def __init__(self) -> None:
        self._waiting: dict[str, queue.SimpleQueue[Any]] = {}
        self._listeners: dict[str, Listener] = {}
        self._lock = threading.RLock()  # a listener may forget

    def put(self, name: str, value: Any) -> None:
        with self._lock:
            if (listener := self._listeners.get(name)) is not None:
                listener(value)
            else:
                self._queue(name).put(value)

    def queue(self, name: str) -> "queue.SimpleQueue[Any]":
        """Returns the queue of what is told under a name that nobody listens to."""
        with self._lock:
            return self._queue(name)

    def listen(self, name: str, listener: Listener) -> None:
        """Hands `listener` each value of a name, those that wait first, one at a time, on any
        thread. It must return soon, and not raise."""
        with self._lock:
            self._listeners[name] = listener
            waiting = self._waiting.pop(name, None)
            while waiting is not None and not waiting.empty():
                listener(waiting.get())

    def forget(self, name: str) -> None:
        """Ends what `listen` has begun."""
        with self._lock:
            self._listeners.pop(name, None)

    def _queue(self, name: str) -> "queue.SimpleQueue[Any]":
        return self._waiting.setdefault(name, queue.SimpleQueue())
