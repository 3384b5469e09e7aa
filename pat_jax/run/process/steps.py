"""The steps of any run: writes and shows the metrics of each step, and saves checkpoints.

Knows metrics and checkpoints. Does not know what is in them.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from pat_jax.common.stopwatch import Stopwatch
from pat_jax.run.logging.metrics import MetricsWriter
from pat_jax.run.process.open_run import OpenRun, WholeStep
from pat_jax.run.process.stop_signals import StopSignals


@contextmanager
def steps_after(whole: WholeStep, files: OpenRun, signals: StopSignals) -> Iterator["Steps"]:
    """Opens the metrics, and yields the steps that follow `whole`. If an error is raised inside,
    the last whole step is saved."""
    files.whole = whole
    files.progress.start(whole.step)
    with files.page.kept(whole.step), files.metrics(whole.step) as metrics:
        steps = Steps(files, signals, metrics)
        with files.saved_at_an_error(signals, steps.write_pending):
            yield steps


class Steps:
    """The steps that a run makes from one start to its end or stop."""

    def __init__(self, files: OpenRun, signals: StopSignals, metrics: MetricsWriter):
        self._files = files
        self.signals = signals
        self.metrics = metrics
        self.clock = Stopwatch()  # stages of the current step
        self._pending: Mapping[str, Any] = {}  # metrics of the last whole step

    def learned(self, whole: WholeStep, measured: Mapping[str, Any]) -> None:
        """Makes `whole` the step that is saved if anything fails later. `measured` may still grow
        before it is written."""
        self._files.whole = whole
        self._pending = measured

    def write(self, step: int, measured: dict[str, Any]) -> None:
        """Adds the seconds of each stage to `measured`, and writes it."""
        measured |= {**self.clock.metrics, "timing/step": self.clock.elapsed}
        self.metrics.write(step, measured)
        self._pending = {}

    def write_pending(self) -> None:
        """Writes the metrics of the last whole step if that has not been done."""
        if self._pending and self._files.whole:
            self.metrics.write(self._files.whole.step, self._pending)

    def end(self, step: int, measured: Mapping[str, Any]) -> None:
        self._files.progress.step(step, measured)
        if self._files.saves.is_due(step):
            self._files.save(self.metrics)
