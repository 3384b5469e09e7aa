"""Trackers, which show a run to people, and may fail without ending it."""

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from tensorboardX import SummaryWriter
from tensorboardX.record_writer import register_writer_factory

from pat_jax.common.files import PatientFile
from pat_jax.run.logging.samples import Sample

log = logging.getLogger(__name__)


class Tracker(Protocol):
    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Writes numbers of a step, which may be NaN. A step may be written several times."""

    def samples(self, step: int, samples: Sequence[Sample]) -> None:
        """Writes a few responses of a step."""

    def close(self) -> None:
        """Returns when everything written has been stored."""


@dataclass
class Guarded:
    """Wraps a tracker so that its failures end no run. The first failure is printed; each later
    write tries again."""

    name: str
    tracker: Tracker
    notify: Callable[[str], None]
    _has_failed: bool = False

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        self._attempt(lambda: self.tracker.write(step, metrics))

    def samples(self, step: int, samples: Sequence[Sample]) -> None:
        self._attempt(lambda: self.tracker.samples(step, samples))

    def close(self) -> None:
        self._attempt(self.tracker.close)

    def _attempt(self, action: Callable[[], None]) -> None:
        try:
            action()
        except Exception as error:  # what trackers raise has no common class
            log.info("tracker %s", self.name, exc_info=error)
            if not self._has_failed:
                self.notify(
                    f"tracker {self.name} failed ({describe_error(error)}): the run goes on, and "
                    "metrics.jsonl has its metrics."
                )
            self._has_failed = True


def describe_error(error: Exception) -> str:
    """Returns an error's type and message, on one line."""
    first = next(iter(str(error).strip().splitlines()), "")
    return f"{type(error).__name__}: {first}" if first else type(error).__name__


_PATIENT = "patient"  # prefix of paths that TensorBoard's writer opens as patient files


class _PatientRecords:
    """A record file that survives a full disk. Otherwise the writer's thread would end, and then
    the run, once the writer's queue is full."""

    def open(self, path: str) -> PatientFile:
        return PatientFile(path.removeprefix(f"{_PATIENT}:"))

    def directory_check(self, path: str) -> None:
        Path(path.removeprefix(f"{_PATIENT}:")).mkdir(parents=True, exist_ok=True)


register_writer_factory(_PATIENT, _PatientRecords())


class TensorBoard:
    """Writes the event files of a folder. Events of an earlier start from `resume_step` on are
    hidden."""

    def __init__(self, folder: Path, resume_step: int | None):
        self._writer = SummaryWriter(f"{_PATIENT}:{folder}", purge_step=resume_step)

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        for name, value in metrics.items():
            if not math.isfinite(value):  # a gap in the curve; the writer would print a warning
                continue
            self._writer.add_scalar(name, value, step)

    def samples(self, step: int, samples: Sequence[Sample]) -> None:
        self._writer.add_text("samples", "\n\n---\n\n".join(map(_markdown, samples)), step)

    def flush(self) -> None:
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


def _markdown(sample: Sample) -> str:
    """Returns a sample as Markdown, with its texts indented so that their markup shows as is."""
    prompt, response = (
        "\n".join(f"    {line}" for line in text.splitlines())
        for text in (sample.prompt, sample.completion)
    )
    return f"**prompt**\n\n{prompt}\n\n**response**: {sample.facts}\n\n{response}"
