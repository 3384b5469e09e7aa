"""The loop of reinforcement learning.

An iteration is a rollout, rewards (`collect.py`), predictions, advantages, updates (`learning.py`),
and a transfer to the engine. `Loop` does these in turn. `OneBehind`, for `--placement.lag 1`, does
them in another order. Knows no array.
"""

from collections.abc import Iterator
from concurrent.futures import Executor, Future
from contextlib import contextmanager
from dataclasses import dataclass

from pat_jax.common.stopwatch import Stopwatch
from pat_jax.common.timeline import recorded
from pat_jax.run.collect import Drawn, Experience
from pat_jax.run.learning import Learned, nothing_to_learn
from pat_jax.run.opened import Run
from pat_jax.run.process.open_run import Steps, steps_after
from pat_jax.run.process.stop_signals import StoppedAtOnce
from pat_jax.run.report import Report

# Every so many iterations a token's log-probability checks the transfer; checksums check all.
COMPARE_EVERY = 16


def learn(run: Run) -> Drawn | None:
    """Runs all iterations. Returns the last batch, or None if no iteration was left to do."""
    whole = run.whole(run.first, (run.collector.totals, run.generator.lengths))
    with (
        run.completions,
        recorded() as timeline,
        steps_after(whole, run.files, run.signals) as steps,
    ):
        report = Report(run, steps, timeline)
        loop = Loop(run, steps, report)
        if run.updates:
            loop = OneBehind(run, steps, report, run.updates)
        with loop.completed():
            for step in range(run.first, run.config.steps):
                loop.iterate(step)
        report.evaluate(run.config.steps)
    return report.last


@dataclass
class Loop:
    """Runs iterations one after the other: each is complete before the next begins."""

    run: Run
    steps: Steps
    report: Report

    @contextmanager
    def completed(self) -> Iterator[None]:
        """A context to run iterations in; when it is left, all iterations are complete."""
        yield

    def iterate(self, step: int) -> None:
        """Runs one iteration, after `step` others."""
        self.report.evaluate_if_due(step)
        self.steps.clock.reset()
        found = self.collect(step)
        with self.run.signals.held():  # from here on the step is completed before a stop
            if self.run.config.train:
                self.run.generator.release()
                learned = self.learn(found, self.steps.clock)
                self.load(found, learned)
            else:
                self.steps.learned(self.run.whole(found.step, found.history), found.measured)
            self.report.complete(found)

    def collect(self, step: int) -> Experience:
        """Generates and scores what the iteration after `step` others learns from."""
        run = self.run
        config = self.run.config
        found = run.collector.collect(step, run.generator, self.steps.clock)
        longest = config.rollout.max_completion_length
        if config.train and (why := nothing_to_learn(config.algorithm, found.scored, longest)):
            run.files.progress.print(f"step {found.step}: {why}")
        return found

    def learn(self, found: Experience, clock: Stopwatch) -> Learned:
        """Predicts columns, computes advantages and updates, for one iteration. With
        `--placement.lag 1`, a rollout runs meanwhile."""
        run = self.run
        roles = self.run.setup.roles
        measured = found.measured
        waited_s = roles.waited_s
        with clock("update"):
            learned = run.learner.learn(found)
            measured |= learned.measured
            self.steps.learned(run.whole(found.step, found.history), measured)
            measured |= run.learner.learn_head(learned.batch)
        waited_s = roles.waited_s - waited_s
        clock.seconds["update"] -= waited_s
        clock.seconds["update/compile"] = waited_s
        measured |= run.learner.describe(found.scored.groups, learned, clock.seconds["update"])
        return learned

    def load(self, found: Experience, learned: Learned) -> None:
        """Transfers the updated policy to the engine, for the next rollout."""
        run = self.run
        params = self.run.learner.state.params
        with self.steps.clock("transfer"):
            run.generator.load(params)
            if found.step % COMPARE_EVERY == 1 or run.config.rollout.check_integrity:
                found.measured["train/transfer_gap"] = run.generator.compare(params)
        run.learner.note_skipped(found.step, learned)


@dataclass(frozen=True)
class Begun:
    """An update that runs on another thread.

    Attributes:
      found: what the update learns from.
      seconds: duration of each stage that collected `found`.
      clock: measures the stages of the update, on its thread.
    """

    found: Experience
    seconds: dict[str, float]
    clock: Stopwatch
    update: Future[Learned]


@dataclass
class OneBehind(Loop):
    """Iterations one step off-policy: while an update runs, the next batch is generated.

    This thread generates batch k + 1 with the policy of k - 1 updates. The thread of the trained
    models updates by batch k. Then it predicts columns of batch k + 1 with the updated models, for
    the responses that have ended. Once both are done, this thread completes step k and loads the
    policy for batch k + 2.
    """

    thread: Executor
    _begun: Begun | None = None

    def iterate(self, step: int) -> None:
        """Collects a step's batch, completes the previous step, and begins this step's update."""
        found = self.collect(step)
        found.measured["rollout/lag"] = int(self._begun is not None)
        seconds = self.steps.clock.take()
        with self.run.signals.held():  # from here on both steps are completed before a stop
            self._complete()
            clock = Stopwatch()
            update = self.thread.submit(self.learn, found, clock)
            self._begun = Begun(found, seconds, clock, update)
        self.report.evaluate_if_due(step)

    @contextmanager
    def completed(self) -> Iterator[None]:
        """A context that completes the last step, whose update still runs, also after an error."""
        self.steps.clock.reset()
        try:
            yield
        except StoppedAtOnce:
            raise
        except BaseException:
            self.run.signals.hold()
            self._complete(goes_on=False)
            raise
        with self.run.signals.held():
            self._complete()

    def _complete(self, *, goes_on: bool = True) -> None:
        """Waits for the running update, if any, and completes its step. Raises its error."""
        if self._begun is None:
            return
        begun = self._begun
        self._begun = None
        clock = self.steps.clock
        found = begun.found
        own = begun.clock.seconds
        with clock("update"):
            learned = begun.update.result()
        clock.seconds |= {**begun.seconds, "update/compile": own["update/compile"]}
        found.measured["train/update_seconds"] = own["update"]
        if goes_on:
            self.run.generator.release()
            self.load(found, learned)
        self.report.complete(found)
        clock.reset()
