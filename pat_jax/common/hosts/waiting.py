"""How long one process waits for others, and what it says meanwhile and at the end.

A process whose main thread hangs (a deadlock, a dead file system) still says that it is alive. Its
heartbeats say too what it has come to and where it is in the program (`At`); who waits counts the
seconds since that was something new. Knows no connection (`link.py`).
"""

import sys
import time
from collections.abc import Mapping
from types import FrameType
from typing import NamedTuple

TROUBLE_S = 60.0  # for others to come to where one says that it is in trouble
LINE_S = 300.0  # between two lines about what is waited for
_SHOWN = 3  # processes that a sentence names
START_AGAIN = "; start all processes again with --resume auto."
_ADVICE = (
    ", and the run cannot go on; start all processes again with --resume auto, and with a higher "
    "--distributed.patience if it takes so long."
)
_DEVICES = {"jax", "jaxlib", "numpy"}  # whose code waits for what devices compute


class At(NamedTuple):
    """Where the main thread of a process is."""

    name: str = "its start"
    count: int = 0  # of all that it has come to: a name may come again
    waits_for: int | None = None  # the process without which it cannot go on
    place: str = ""  # in our code
    is_on_devices: bool = False  # it waits for what they compute, as most of a run does

    def next(self, name: str) -> "At":
        return At(name, self.count + 1)

    def seen(self, thread: int) -> "At":
        """With the place where `thread` is now."""
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
        """Is another one where the process goes on: within one place it may hang or compute."""
        return self.count, self.waits_for

    def __str__(self) -> str:
        return f"last at {self.name!r}" + (f", in {self.place}" if self.place else "")


class Wait:
    """One process waits for another, from now on.

    Args:
      me, other: who waits for whom, in words.
      index: of the one that waits.
      name: at what.
      patience_s: how long the other may come to nothing new.
      trouble: why it may not come, where this process is to blame.
    """

    def __init__(
        self, me: str, other: str, index: int, name: str, patience_s: float, trouble: str = ""
    ):
        self._me, self._other, self._index, self._name = me, other, index, name
        self._patience_s = min(patience_s, TROUBLE_S) if trouble else patience_s
        self._trouble = trouble
        self._progress: tuple[int, int | None] | None = None
        self._since = self._logged_at = time.monotonic()

    @property
    def look_s(self) -> float:
        """How often to look at where the other is."""
        return min(1.0, self._patience_s / 4)

    def is_over(self, at: At) -> bool:
        """Whether the other, last heard of `at`, has come to nothing new for too long."""
        now = time.monotonic()
        # One that waits for a third is not what the run waits for: it looks at that one by itself.
        waits_for_a_third = at.waits_for not in (None, self._index)
        if waits_for_a_third or at.progress != self._progress:
            self._progress, self._since = at.progress, now
        return now - self._since > self._patience_s

    def line(self, at: At) -> str:
        """What is waited for, each time that nothing was printed for long enough; else empty."""
        if (now := time.monotonic()) - self._logged_at < LINE_S:
            return ""
        self._logged_at = now
        whom = f", which waits for process {at.waits_for}" if at.waits_for is not None else ""
        return f"{self._me} waits at {self._name!r} for {self._other}, {at}{whom}"

    def sentence(self, at: At) -> str:
        """Why nobody waits any longer."""
        if self._trouble:
            return f"{self._trouble}, and {self._other}, {at}, cannot go on without its part{START_AGAIN}"
        return (
            f"{self._other} has come to nothing new for {self._patience_s:.0f} s, {at}, while {self._me} "
            f"waits for it at {self._name!r}{_ADVICE}"
        )


class Stall:
    """All processes at once: where one hangs, the others mostly wait on their devices."""

    def __init__(self, patience_s: float):
        self._patience_s = patience_s
        self._progress: list[tuple[int, int | None]] = []
        self._since = time.monotonic()

    def sentence(self, ats: Mapping[str, At]) -> str:
        """Why the run ends; empty while a process goes on, or waits for another by itself."""
        now, progress = time.monotonic(), [at.progress for at in ats.values()]
        waits = any(at.waits_for is not None for at in ats.values())
        if waits or progress != self._progress:
            self._progress, self._since = progress, now
        if now - self._since <= self._patience_s:
            return ""
        named = [who for who, at in ats.items() if not at.is_on_devices]
        rest = ", while the others wait for their devices"
        if len(named) in (0, len(ats)):
            named, rest = list(ats), ""
        if len(named) == 1:
            return self._sentence(f"{named[0]} has", f", {ats[named[0]]}{rest}")
        shown = "; ".join(f"{who}: {ats[who]}" for who in named[:_SHOWN])
        more = f"; and {len(named) - _SHOWN} more" if len(named) > _SHOWN else ""
        return self._sentence("processes have", f" ({shown}{more}){rest}")

    def _sentence(self, who: str, where: str) -> str:
        return f"{who} come to nothing new for {self._patience_s:.0f} s{where}{_ADVICE}"


def _module(frame: FrameType) -> str:
    return frame.f_globals.get("__name__", "")
