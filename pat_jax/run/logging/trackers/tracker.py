"""Trackers, which show a run to people, and may fail without ending it."""

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from pat_jax.run.logging.samples import Sample

log = logging.getLogger(__name__)


class Tracker(Protocol):
    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Writes numbers of a step, which may be NaN. A step may be written several times."""

    def samples(self, step: int, samples: Sequence[Sample]) -> None:
        """Writes a few responses of a step."""

    def close(self) -> None:
        """Returns when everything written has been stored."""


class Guarded:
    """Wraps a tracker so that its failures end no run. The first failure is printed; each later
    write tries again."""

    def __init__(self, name: str, tracker: Tracker, notify: Callable[[str], None]):
        self._name = name
        self._tracker = tracker
        self._notify = notify
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
    """Returns an error's type and message, on one line."""
    first = next(iter(str(error).strip().splitlines()), "")
    return f"{type(error).__name__}: {first}" if first else type(error).__name__
