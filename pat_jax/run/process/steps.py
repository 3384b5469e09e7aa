"""The steps of a run, whatever one computes: what is measured, shown and saved of each.

Knows metrics and checkpoints. Does not know what is in them.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from pat_jax.common.stopwatch import Stopwatch
from pat_jax.run.process.open_run import Kept, OpenRun
from pat_jax.run.process.stop_signals import Stopped, StopSignals


class Steps:
    """Those of one start of a run; `kept` gives state and metadata of the last whole step."""

    def __init__(self, opened: OpenRun, signals: StopSignals, kept: Callable[[], Kept]):
        self._open, self._kept, self.signals = opened, kept, signals
        self.clock = Stopwatch()  # of a step
        self.first = 0  # steps that were done before this start
        self.done: int | None = None  # None: there is nothing yet that is worth keeping
        self._unwritten: Mapping[str, Any] = {}
        signals.last_words = opened.last_words

    @contextmanager
    def kept_at_a_stop(self) -> Iterator[None]:
        """A signal that stops what is done inside has the last whole step saved first."""
        try:
            yield
        except Stopped as stop:
            self._open.stop(stop, self.done, self._kept)
            raise

    @contextmanager
    def going_on(self) -> Iterator[None]:
        """Steps are made while it is entered; at any error the last whole one is saved."""
        run, first = self._open, self.first
        run.progress.start(first)
        with (
            run.page.kept(first),
            run.metrics(first) as self.metrics,
            run.saved_at_an_error(self.signals, self.last),
        ):
            yield

    def has_learned(self, step: int, measured: Mapping[str, Any]) -> None:
        """From here on this is the step that is saved, whatever fails; what is measured later is
        added."""
        self.done, self._unwritten = step, measured

    def write(self, step: int, measured: dict[str, Any]) -> None:
        """All that was measured in a step, its stages included."""
        measured |= {**self.clock.metrics, "timing/step": self.clock.elapsed}
        self.metrics.write(step, measured)
        self._unwritten = {}

    def end(self, step: int, measured: Mapping[str, Any]) -> None:
        self._open.progress.step(step, measured)
        if self._open.saves.is_due(step):
            self._open.save(step, self._kept(), self.metrics)

    def last(self) -> tuple[int, Kept]:
        """The last whole step; what was measured in it is written."""
        assert self.done is not None  # it is asked for while steps are made
        if self._unwritten:
            self.metrics.write(self.done, self._unwritten)
        return self.done, self._kept()

    def save_last(self, step: int) -> None:
        """Returns when the run's last step is on disk."""
        with self.signals.held():
            self._open.save_last(step, self._kept())
