"""Decides how long one process waits for others, and what it prints meanwhile and at the end.

A process whose main thread hangs (a deadlock, a dead file system) still sends heartbeats. They tell
the last point that the main thread reached, and where it is in the program (`At`). A process that
waits for it counts the seconds since that point was new. Does not know connections (`link.py`).
"""

import gc
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import FrameType
from typing import NamedTuple

TROUBLE_S = 60.0  # for others to reach a process that reports trouble
LINE_S = 300.0  # between two lines about a wait
_SHOWN = 3  # processes named in a sentence
START_AGAIN = "; start all processes again with --resume auto."
_ADVICE = (
    ", and the run cannot go on; start all processes again with --resume auto, and with a higher "
    "--distributed.patience if it takes so long."
)
_DEVICES = {"jax", "jaxlib", "numpy"}  # packages whose code waits for devices


class At(NamedTuple):
    """How far the main thread of a process has come."""

    name: str = "its start"  # the last point that it reached (`ProcessGroup.reach_point`)
    count: int = 0  # points reached so far, as names may repeat
    waits_for: int | None = None  # index of the process that it waits for
    place: str = ""  # line and function of our code
    is_on_devices: bool = False  # waits for devices, as a run mostly does

    def next(self, name: str) -> "At":
        return At(name, self.count + 1)

    def seen(self, thread: int) -> "At":
        """Returns a copy with the line of our code at which `thread` is now."""
        with _without_collections():
            frame = innermost = sys._current_frames().get(thread)
            while frame is not None and not _module(frame).startswith("pat_jax."):
                frame = frame.f_back
            if frame is None or innermost is None:
                return self
            place = f"{_module(frame)}:{frame.f_lineno} ({frame.f_code.co_name})"
            on_devices = _module(innermost).partition(".")[0] in _DEVICES
        return self._replace(place=place, is_on_devices=on_devices)

    @property
    def progress(self) -> tuple[int, int | None]:
        """A value that changes when the process makes progress. The line of code does not count: it
        does not tell whether the process computes or hangs."""
        return self.count, self.waits_for

    def __str__(self) -> str:
        return f"last at {self.name!r}" + (f", in {self.place}" if self.place else "")


class Wait:
    """A wait of one process for another, which begins now.

    Args:
      me, other: names of the process that waits, and of the one it waits for.
      index: index of the process that waits.
      name: the point where it waits.
      patience_s: how long the other may make no progress.
      trouble: what this process could not do, which may keep the other from coming.
    """

    def __init__(
        self, me: str, other: str, index: int, name: str, patience_s: float, trouble: str = ""
    ):
        self._me = me
        self._other = other
        self._index = index
        self._name = name
        self._patience_s = min(patience_s, TROUBLE_S) if trouble else patience_s
        self._trouble = trouble
        self._progress: tuple[int, int | None] | None = None
        self._since = self._logged_at = time.monotonic()

    @property
    def look_s(self) -> float:
        """Seconds between two looks at the other's progress."""
        return min(1.0, self._patience_s / 4)

    def is_over(self, at: At) -> bool:
        """Returns whether the other, last heard of `at`, has made no progress for too long."""
        now = time.monotonic()
        # If the other waits for a third process, it watches that one itself.
        waits_for_a_third = at.waits_for not in (None, self._index)
        if waits_for_a_third or at.progress != self._progress:
            self._progress = at.progress
            self._since = now
        return now - self._since > self._patience_s

    def line(self, at: At) -> str:
        """Returns a line about the wait if none was printed for LINE_S, else ""."""
        if (now := time.monotonic()) - self._logged_at < LINE_S:
            return ""
        self._logged_at = now
        whom = f", which waits for process {at.waits_for}" if at.waits_for is not None else ""
        return f"{self._me} waits at {self._name!r} for {self._other}, {at}{whom}"

    def sentence(self, at: At) -> str:
        """Returns the message with which this process gives up."""
        if self._trouble:
            return f"{self._trouble}, and {self._other}, {at}, cannot go on without its part{START_AGAIN}"
        return (
            f"{self._other} has come to nothing new for {self._patience_s:.0f} s, {at}, while {self._me} "
            f"waits for it at {self._name!r}{_ADVICE}"
        )


class Stall:
    """Watches all processes at once: if one hangs, the others mostly wait for their devices."""

    def __init__(self, patience_s: float):
        self._patience_s = patience_s
        self._progress: list[tuple[int, int | None]] = []
        self._since = time.monotonic()

    def sentence(self, ats: Mapping[str, At]) -> str:
        """Returns the error message if no process has made progress for too long, else "". `ats`
        tells how far each process has come, by its name. A process that waits for another is
        watched by `Wait`."""
        now = time.monotonic()
        progress = [at.progress for at in ats.values()]
        waits = any(at.waits_for is not None for at in ats.values())
        if waits or progress != self._progress:
            self._progress = progress
            self._since = now
        if now - self._since <= self._patience_s:
            return ""
        named = [who for who, at in ats.items() if not at.is_on_devices]
        rest = ", while the others wait for their devices"
        if len(named) in (0, len(ats)):
            named = list(ats)
            rest = ""
        if len(named) == 1:
            return self._sentence(f"{named[0]} has", f", {ats[named[0]]}{rest}")
        shown = "; ".join(f"{who}: {ats[who]}" for who in named[:_SHOWN])
        more = f"; and {len(named) - _SHOWN} more" if len(named) > _SHOWN else ""
        return self._sentence("processes have", f" ({shown}{more}){rest}")

    def _sentence(self, who: str, where: str) -> str:
        return f"{who} come to nothing new for {self._patience_s:.0f} s{where}{_ADVICE}"


_looks = threading.Lock()


@contextmanager
def _without_collections() -> Iterator[None]:
    """Keeps garbage from being collected while frames of other threads are looked at. Python 3.11
    collects within `sys._current_frames` and `f_back`, and may run another thread meanwhile: then
    the process stops for ever (https://github.com/python/cpython/issues/106883), or `f_back` reads
    a frame that is gone."""
    with _looks:  # else the first of two threads that ends would allow it to the other
        was_enabled = gc.isenabled()
        gc.disable()
        try:
            yield
        finally:
            if was_enabled:
                gc.enable()


def _module(frame: FrameType) -> str:
    return frame.f_globals.get("__name__", "")
