"""An open run: holds its folder, and writes its options, log, metrics, page and checkpoints.

Knows files, checkpoints, metrics and steps. Does not know what the run computes.
"""

import logging
import shlex
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from filelock import BaseFileLock

from pat_jax.common.files import replace_text
from pat_jax.common.hosts.options import DistributedConfig
from pat_jax.common.hosts.together import process_group
from pat_jax.common.hosts.waiting import START_AGAIN
from pat_jax.common.stopwatch import Stopwatch
from pat_jax.config.any_run import AnyRun
from pat_jax.config.command_line import dump
from pat_jax.run.checkpoints.checkpoint import Checkpointer
from pat_jax.run.checkpoints.files import CHECKPOINTS
from pat_jax.run.checkpoints.orbax_io import first_line
from pat_jax.run.checkpoints.schedule import Saves
from pat_jax.run.files.asked_again import asked_again
from pat_jax.run.files.folder import (
    CONFIG_FILE,
    LOG_FILE,
    METRICS_FILE,
    changed_options,
    log_to,
    make_run_dir,
)
from pat_jax.run.files.hub_names import keep_names
from pat_jax.run.logging.banner import closing
from pat_jax.run.logging.metrics import MetricsWriter, read_metrics
from pat_jax.run.logging.page.run_page import RunPage
from pat_jax.run.logging.progress import Progress, summarize
from pat_jax.run.logging.trackers.asked_for import begin_trackers
from pat_jax.run.logging.trackers.tracker import Tracker
from pat_jax.run.process.stop_signals import Stopped, StoppedAtOnce, StopSignals

log = logging.getLogger(__name__)
Restored = tuple[int, dict[str, Any], dict[str, Any]]  # step, state and metadata of a checkpoint


@dataclass(frozen=True)
class WholeStep:
    """A completed step, as a checkpoint saves it.

    Attributes:
      state: training states of the trained models, by role.
      beside: functions that write further files before the checkpoint is written, given the step.
    """

    step: int
    state: Mapping[str, Any]
    meta: Mapping[str, Any]
    beside: Sequence[Callable[[int], None]] = ()


class OpenRun:
    """Locks the folder until it is released or the process ends. Raises UserError if the folder
    belongs to another run, or if a tracker cannot begin.

    Args:
      command: the command of such runs, as in `python -m pat_jax.COMMAND`.
      steps: steps of the whole run.
      fingerprint: a checkpoint can only be resumed if it has the same fingerprint.
    """

    def __init__(
        self,
        config: AnyRun,
        command: str,
        *,
        steps: int,
        fingerprint: Mapping[str, object],
    ):
        self._config = config
        self._command = command
        self._started = time.perf_counter()
        self.whole: WholeStep | None = None  # the last whole step; None: nothing to save yet
        shared = Path(config.run_dir)
        us = process_group()
        self._lock: BaseFileLock | None = None  # held by the first process
        self._changed = us.agree("the run's folder", self._hold)
        self.folder = folder = us.folder(shared)
        # Without options that belong to one start only.
        begun = replace(config, resume=False, distributed=DistributedConfig())
        self._config_text = dump(begun)
        replace_text(folder / CONFIG_FILE, self._config_text)
        keep_names(folder)
        self.checkpoints = Checkpointer(
            shared / CHECKPOINTS, config.checkpoint.max_to_keep, fingerprint=fingerprint
        )
        log_to(folder / LOG_FILE)
        self.page = RunPage(folder)
        self._trackers: Mapping[str, Tracker] = {}
        if us.is_first:
            self._trackers = begin_trackers(
                config.trackers,
                folder,
                config.tracker_project,
                asdict(config),
                is_resumed=config.resume,
            )
        self.progress = Progress(steps)
        every = config.checkpoint.every
        self.saves = Saves(self.checkpoints, every, steps, self.progress.print)

    def _hold(self) -> list[str]:
        """Locks the folder, and returns the options that differ from before."""
        config = self._config
        self._lock = make_run_dir(config.run_dir, is_resumed=config.resume)
        return changed_options(config, Path(config.run_dir))

    def tell_changes(self) -> None:
        """Prints which options of a resumed run differ from before."""
        if changed := ", ".join(self._changed):
            self.progress.print(f"resumed with other options: {changed}")

    def restore(self, abstract: Mapping[str, Any]) -> Restored | None:
        """Returns step, state and metadata of a resumed run's newest whole checkpoint, or None if
        there is no checkpoint. `abstract` has the shapes and shardings of the state. Raises
        UserError if all checkpoints are damaged."""
        if not self._config.resume:
            return None
        if self.checkpoints.latest_step() is None:
            self.progress.print("no checkpoint to resume from: the run begins anew")
            return None
        try:
            found = self.checkpoints.restore(dict(abstract))
        finally:
            for line in self.checkpoints.stepped_over:
                self.progress.print(line)
        self.progress.print(f"resumed after step {found[0]}")
        return found

    @contextmanager
    def kept_at_a_stop(self) -> Iterator[None]:
        """If a signal stops the run inside, saves the last whole step, and prints how to resume."""
        try:
            yield
        except Stopped as stop:
            what = self._save_by(self.saves.stop) if self.whole else self.saves.on_disk()
            self.checkpoints.close()
            self._notify_last(f"stopped by {stop.name}: {what}; {self._again}")
            raise

    def metrics(self, first_step: int) -> MetricsWriter:
        """Opens the metrics; `first_step` steps were done before this start."""
        resume_step = first_step + 1 if self._config.resume else None
        trackers = self._trackers
        notify = self.progress.print
        return MetricsWriter(self.folder, resume_step=resume_step, trackers=trackers, notify=notify)

    def save(self, metrics: MetricsWriter) -> None:
        """Saves the last whole step, whose metrics are written: a run resumed from here does not
        repeat it."""
        start = time.perf_counter()
        metrics.flush()
        self._save_by(self.saves.save)
        assert self.whole is not None, "saved"
        metrics.write(self.whole.step, {"timing/checkpoint": time.perf_counter() - start})

    def save_last(self) -> None:
        """Returns when the last whole step is on disk. Raises UserError if several attempts to save
        it fail."""
        self._save_by(self.saves.end)

    @contextmanager
    def saved_at_an_error(
        self, signals: StopSignals, write_metrics: Callable[[], None]
    ) -> Iterator[None]:
        """If an error is raised inside, saves the last whole step before the error is raised
        further. Before that, `write_metrics` writes the pending metrics of that step."""
        try:
            yield
        except (Stopped, StoppedAtOnce):  # `stop` saves at the first; the second saves nothing
            raise
        except BaseException:
            signals.hold()
            if process_group().is_alone:
                self._notify_last(f"{self._saved(write_metrics)}; {self._again}")
            else:  # a state spread over all processes cannot be saved by one of them
                self._notify_last(f"{self.saves.on_disk()}{START_AGAIN}")
            raise

    def _saved(self, write_metrics: Callable[[], None]) -> str:
        """Saves the last whole step, and returns a clause about it, also if saving fails."""
        try:
            write_metrics()
            return self._save_by(self.saves.stop)
        except Exception as error:
            log.error("the last whole step was not saved", exc_info=error)
            return f"the last whole step was not saved ({first_line(error)}), and {self.saves.on_disk()}"

    def last_words(self) -> str:
        """Returns what is saved and how to resume; can be called at any time."""
        return f"{self.saves.on_disk()}; {self._again}"

    @property
    def _again(self) -> str:
        words = ["--resume", "--run_dir", str(self.folder), *asked_again(self._config)]
        return f"go on with: python -m pat_jax.{self._command} {shlex.join(words)}"

    def _notify_last(self, text: str) -> None:
        # The reader of the output may have gone, which may be why the run ends.
        with suppress(OSError):
            self.progress.close()
            print(text, file=sys.stderr, flush=True)

    def close(self) -> None:
        """Waits for the checkpoint that is being written."""
        self.checkpoints.close()
        self.progress.close()

    def release(self) -> None:
        """Unlocks the folder, though this process continues."""
        self.checkpoints.close()
        if self._lock is not None:
            self._lock.release()

    def tell_end(self, compile_s: float, plan: str = "") -> None:
        """Prints a summary of the run, where its time went, and what is in its folder. `plan`
        describes the plan of the newest rollout."""
        print(summarize(read_metrics(self.folder / METRICS_FILE)))
        if plan:
            print(f"newest rollout: {plan}")
        total_s = time.perf_counter() - self._started
        export_dir, exported = self._config.checkpoint.export_dir, self._config.exported
        print(closing(self.folder, export_dir, exported, compile_s=compile_s, total_s=total_s))

    def _save_by(self, save: Callable[[int, dict[str, Any], dict[str, Any]], Any]) -> Any:
        """Calls `save` with step, state and metadata of the last whole step; returns its result.
        The options are part of the metadata: a damaged config.yaml is restored from them."""
        whole = self.whole
        assert whole is not None, "called only where there is one"
        for save_beside in whole.beside:
            save_beside(whole.step)
        return save(whole.step, dict(whole.state), {**whole.meta, "config": self._config_text})


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


@dataclass
class Steps:
    """The steps that a run makes from one start to its end or stop."""

    files: OpenRun
    signals: StopSignals
    metrics: MetricsWriter
    clock: Stopwatch = field(default_factory=Stopwatch)  # stages of the current step
    _pending: Mapping[str, Any] = field(default_factory=dict)  # metrics of the last whole step

    def learned(self, whole: WholeStep, measured: Mapping[str, Any]) -> None:
        """Makes `whole` the step that is saved if anything fails later. `measured` may still grow
        before it is written."""
        self.files.whole = whole
        self._pending = measured

    def write(self, step: int, measured: dict[str, Any]) -> None:
        """Adds the seconds of each stage to `measured`, and writes it."""
        measured |= {**self.clock.metrics, "timing/step": self.clock.elapsed}
        self.metrics.write(step, measured)
        self._pending = {}

    def write_pending(self) -> None:
        """Writes the metrics of the last whole step if that has not been done."""
        if self._pending and self.files.whole:
            self.metrics.write(self.files.whole.step, self._pending)

    def end(self, step: int, measured: Mapping[str, Any]) -> None:
        self.files.progress.step(step, measured)
        if self.files.saves.is_due(step):
            self.files.save(self.metrics)
