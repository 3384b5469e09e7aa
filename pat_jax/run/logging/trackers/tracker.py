"""What writes down a run for people, and may fail without ending it."""

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from pat_jax.run.logging.samples import Sample

log = logging.getLogger(__name__)


class Tracker(Protocol):
    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Numbers of a step, NaN for what is not finite; a step may come several times."""

    def samples(self, step: int, samples: Sequence[Sample]) -> None:
        """A few responses of a step."""

    def close(self) -> None:
        """All that was written is where it belongs when this returns."""


class Guarded:
    """A tracker that ends no run: its first failure is printed, and it is tried again with each
    write."""

    def __init__(self, name: str, tracker: Tracker, notify: Callable[[str], None]):
        self._name, self._tracker, self._notify = name, tracker, notify
        self._has_failed = False

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        self._attempt(lambda: self._tracker.write(step, metrics))

    def samples(self, step: int, samples: Sequence[Sample]) -> None:
        self._attempt(lambda: self._tracker.samples(step, samples))

    def close(self) -> None:
        self._attempt(self._tracker.close)

    def _attempt(self, action: Callable[[], None]) -> None:
        try:
            action()
        except Exception as error:  # what trackers raise has no common class
            log.info("tracker %s", self._name, exc_info=error)
            if not self._has_failed:
                self._notify(
                    f"tracker {self._name} failed ({describe_error(error)}): the run goes on, and "
                    "metrics.jsonl has its metrics."
                )
            self._has_failed = True


def describe_error(error: Exception) -> str:
    """On one line, with its type."""
    first = next(iter(str(error).strip().splitlines()), "")
    return f"{type(error).__name__}: {first}" if first else type(error).__name__
