"""Iterations one step off-policy: the update of a batch goes on while the next batch is generated.

The main thread generates batch k + 1 with the policy of k - 1 updates. The thread of the lane that
learns updates by batch k, and then reads what has ended of batch k + 1, with the updated models.
Once both are done, the main thread completes step k and loads the policy for batch k + 2. Knows
when these happen. Does not know what they do (`loop.py`).
"""

from collections.abc import Iterator, Mapping
from concurrent.futures import Executor, Future
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Protocol

from pat_jax.common.stopwatch import Stopwatch
from pat_jax.run.collect import Experience
from pat_jax.run.generation import Generator
from pat_jax.run.learning import Learned
from pat_jax.run.process.steps import Steps
from pat_jax.run.process.stop_signals import StoppedAtOnce


class Iterated(Protocol):
    """The parts of an iteration of a run (`loop.Loop`)."""

    steps: Steps
    generator: Generator

    def collect(self, step: int) -> Experience: ...

    def learn_from(self, step: int, experience: Experience, clock: Stopwatch) -> Learned: ...

    def load(self, step: int, learned: Learned, experience: Experience) -> None: ...

    def complete(self, step: int, experience: Experience) -> None: ...

    def evaluate_if_due(self, step: int) -> None: ...


@dataclass
class LateBatch:
    """A batch and its update.

    Attributes:
      step: the iteration that learns from it, from 1.
      seconds: of each stage in which it was collected.
      clock: of its update, which has a thread of its own.
      learned: what the update returns; None until then.
    """

    step: int
    experience: Experience
    seconds: Mapping[str, float]
    clock: Stopwatch = field(default_factory=Stopwatch)
    learned: Learned | None = None


class LateUpdates:
    """The iterations of a run with `--placement.lag 1`; `thread` is that of the trained models."""

    def __init__(self, run: Iterated, thread: Executor):
        self._run, self._thread = run, thread
        self._begun: tuple[LateBatch, Future[None]] | None = None  # the update that goes on

    def iterate(self, step: int) -> None:
        """Collects the batch of an iteration, completes the step before, and begins the update."""
        run = self._run
        experience = run.collect(step)
        experience.measured["rollout/lag"] = int(self._begun is not None)
        batch = LateBatch(step + 1, experience, run.steps.clock.take())
        with run.steps.signals.held():  # from here on both steps are completed before a stop
            self._complete()
            self._begun = batch, self._thread.submit(self._learn, batch)
        run.evaluate_if_due(step)

    @contextmanager
    def completed(self) -> Iterator[None]:
        """At the end, also at an error or a stop, completes the step whose update goes on."""
        self._run.steps.clock.reset()
        try:
            yield
        except StoppedAtOnce:
            raise
        except BaseException:
            self._run.steps.signals.hold()
            self._complete(goes_on=False)
            raise
        with self._run.steps.signals.held():
            self._complete()

    def _learn(self, batch: LateBatch) -> None:
        batch.learned = self._run.learn_from(batch.step, batch.experience, batch.clock)

    def _complete(self, *, goes_on: bool = True) -> None:
        """Waits for the update, if one goes on, and completes its step. Raises whatever the update
        has raised."""
        if self._begun is None:
            return
        (batch, update), self._begun = self._begun, None
        run, clock, measured = self._run, self._run.steps.clock, batch.experience.measured
        with clock("update"):
            update.result()
        assert batch.learned is not None, "the update has ended"
        own = batch.clock.seconds
        clock.seconds |= {**batch.seconds, "update/compile": own["update/compile"]}
        measured["train/update_seconds"] = own["update"]
        if goes_on:
            run.generator.release()
            run.load(batch.step, batch.learned, batch.experience)
        run.complete(batch.step, batch.experience)
        clock.reset()
