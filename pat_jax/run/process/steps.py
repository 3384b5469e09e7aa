"""The steps of a run of any kind: writes, shows and saves what each has measured and learned.

Knows metrics and checkpoints. Does not know what is in them.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from pat_jax.common.stopwatch import Stopwatch
from pat_jax.run.process.open_run import Kept, OpenRun
from pat_jax.run.process.stop_signals import Stopped, StopSignals


class Steps:
    """The steps of one start of a run. `kept` returns state and metadata of the last whole step."""

    def __init__(self, opened: OpenRun, signals: StopSignals, kept: Callable[[], Kept]):
        self._open, self._kept, self.signals = opened, kept, signals
        self.clock = Stopwatch()  # stages of the current step
        self.first = 0  # steps that were done before this start
        self.done: int | None = None  # the last whole step; None: nothing to save yet
        self._unwritten: Mapping[str, Any] = {}
        signals.last_words = opened.last_words

    @contextmanager
    def kept_at_a_stop(self) -> Iterator[None]:
        """While entered, saves the last whole step if a signal stops the run."""
        try:
            yield
        except Stopped as stop:
            self._open.stop(stop, self.done, self._kept)
            raise

    @contextmanager
    def going_on(self) -> Iterator[None]:
        """Enters the phase of steps: opens the metrics, and saves the last whole step at an
        error."""
        run, first = self._open, self.first
        run.progress.start(first)
        with (
            run.page.kept(first),
            run.metrics(first) as self.metrics,
            run.saved_at_an_error(self.signals, self.last),
        ):
            yield

    def has_learned(self, step: int, measured: Mapping[str, Any]) -> None:
        """Makes `step` the one that is saved if anything fails later. `measured` may still grow
        before it is written."""
        self.done, self._unwritten = step, measured

    def write(self, step: int, measured: dict[str, Any]) -> None:
        """Adds the seconds of each stage to `measured`, and writes it."""
        measured |= {**self.clock.metrics, "timing/step": self.clock.elapsed}
        self.metrics.write(step, measured)
        self._unwritten = {}

    def end(self, step: int, measured: Mapping[str, Any]) -> None:
        self._open.progress.step(step, measured)
        if self._open.saves.is_due(step):
            self._open.save(step, self._kept(), self.metrics)

    def last(self) -> tuple[int, Kept]:
        """Returns the last whole step with what is saved of it; writes its metrics if pending."""
        assert self.done is not None  # called only inside `going_on`
        if self._unwritten:
            self.metrics.write(self.done, self._unwritten)
        return self.done, self._kept()

    def save_last(self, step: int) -> None:
        """Saves the run's last step, and returns when it is on disk."""
        with self.signals.held():
            self._open.save_last(step, self._kept())
