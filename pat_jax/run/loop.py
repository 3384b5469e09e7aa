"""The loop of reinforcement learning: `Loop.iterate` is the whole algorithm.

With `--placement.lag 1`, `late_updates.py` has its parts in another order. Connects the packages.
Knows no option of the command line and no array.
"""

import logging
from collections.abc import Iterator
from concurrent.futures import Executor
from contextlib import contextmanager
from dataclasses import dataclass

from pat_jax.common.stopwatch import Stopwatch
from pat_jax.common.timeline import recorded
from pat_jax.config.run import RunConfig
from pat_jax.engine.record.plot import plot_rollout
from pat_jax.engine.sizing.memory_words import describe_peak
from pat_jax.rl.data import arithmetic
from pat_jax.run.collect import Collector, Drawn, Experience, History
from pat_jax.run.evaluation import Evaluator
from pat_jax.run.generation import Generator
from pat_jax.run.late_updates import LateUpdates
from pat_jax.run.learning import Learned, Learner, nothing_to_learn
from pat_jax.run.logging.completions import Completions
from pat_jax.run.logging.speed import describe_memory
from pat_jax.run.logging.stage_log import StageLog
from pat_jax.run.logging.unmoved import Unmoved
from pat_jax.run.other_placements import compared
from pat_jax.run.process.open_run import OpenRun, WholeStep
from pat_jax.run.process.steps import Steps, steps_after
from pat_jax.run.process.stop_signals import StopSignals
from pat_jax.run.roles.export import export_roles
from pat_jax.run.start.compiling import Compiled
from pat_jax.run.start.earlier_texts import EarlierIterations
from pat_jax.run.start.setup import Setup

log = logging.getLogger(__name__)

# One transfer in so many is checked by a token's log-probability too; checksums check them all.
COMPARE_EVERY = 16
SAMPLES_EVERY = 20  # iterations; responses are shown after the first, too


@dataclass(frozen=True)
class Run:
    """A training run that is compiled, restored and warmed up (`opened.py`).

    Attributes:
      first: steps that were done before this start.
      earlier: responses of earlier iterations to copy drafts from, if any are kept.
      updates: the thread of `--placement.lag 1`; None: updates wait for rollouts.
    """

    setup: Setup
    files: OpenRun
    signals: StopSignals
    compiled: Compiled
    first: int
    collector: Collector
    generator: Generator
    learner: Learner
    evaluator: Evaluator
    completions: Completions
    earlier: EarlierIterations | None
    updates: Executor | None

    @property
    def config(self) -> RunConfig:
        return self.setup.config

    def whole(self, step: int, history: History) -> WholeStep:
        """Returns `step` as the learner has it now, to be saved."""
        totals, lengths = history
        # Of whole steps only: what an interrupted step has drawn is drawn again.
        meta = {"lengths": lengths.to_json(), "problems": self.setup.task.checksums}
        meta |= self.learner.meta | totals.to_json()
        beside = [one.save for one in (self.earlier, self.learner.exit_head) if one is not None]
        return WholeStep(step, self.learner.kept, meta, beside)


def learn(run: Run) -> Drawn | None:
    """Runs all iterations. Returns the last batch; None if there was nothing left to do."""
    whole = run.whole(run.first, (run.collector.totals, run.generator.lengths))
    with (
        run.completions,
        recorded() as timeline,
        steps_after(whole, run.files, run.signals) as steps,
    ):
        loop = Loop(run, steps, StageLog(timeline, run.setup.places))
        order = LateUpdates(loop, run.updates) if run.updates else loop
        with order.completed():
            for step in range(run.first, run.config.steps):
                order.iterate(step)
        loop.evaluate(run.config.steps)
    return loop.last


def finish(run: Run, last: Drawn | None) -> None:
    """Saves and exports what was learned, and prints a summary."""
    config, setup, plan = run.config, run.setup, ""
    if last is not None:
        plan = last.report.first_plan
        with run.signals.held():
            run.files.save_last()
        run.collector.unfinished.finish()
        plot_rollout(last.trace(setup.engine.capacity), run.files.folder / "rollout.svg")
    run.files.close()
    log.info("%s", describe_peak(setup.memory, setup.devices, run.compiled.update))
    tokenizer_dir = arithmetic.TOKENIZER_DIR if config.data.is_arithmetic else None
    step = max(config.steps, run.first)
    export_roles(setup.roles, run.learner.states, step, config.run_dir, tokenizer_dir)
    run.files.tell_end(run.compiled.seconds, plan)


class Loop:
    """The iterations of a run."""

    def __init__(self, run: Run, steps: Steps, stages: StageLog):
        self._run, self.steps, self._stages = run, steps, stages
        self.generator, self.learner = run.generator, run.learner
        self._config, self._notify = run.config, run.files.progress.print
        self._unmoved = Unmoved(self._notify, run.config.rollout.max_completion_length)
        self.last: Drawn | None = None  # the batch of the last iteration

    @contextmanager
    def completed(self) -> Iterator[None]:
        """Each iteration is complete once `iterate` returns."""
        yield

    def iterate(self, step: int) -> None:
        """Runs one iteration: prompts, rollout, rewards, advantages, update."""
        self.evaluate_if_due(step)
        self.steps.clock.reset()
        experience = self.collect(step)
        with self.steps.signals.held():  # from here on the step is completed before a stop
            if self._config.train:
                self.update(step + 1, experience)
            else:
                whole = self._run.whole(step + 1, experience.history)
                self.steps.learned(whole, experience.measured)
            self.complete(step + 1, experience)

    def collect(self, step: int) -> Experience:
        """Returns what iteration `step`, from 0, learns from."""
        config = self._config
        found = self._run.collector.collect(step, self.generator, self.steps.clock)
        if config.train and (why := nothing_to_learn(config, found.groups, found.rewards)):
            self._notify(f"step {step + 1}: {why}")
        return found

    def update(self, step: int, experience: Experience) -> None:
        """Updates the policy, and loads it for the next rollout."""
        self.generator.release()
        learned = self.learn_from(step, experience, self.steps.clock)
        self.load(step, learned, experience)

    def learn_from(self, step: int, experience: Experience, clock: Stopwatch) -> Learned:
        """Updates the trained models. Runs beside a rollout with `--placement.lag 1`."""
        learner, measured = self.learner, experience.measured
        roles = self._run.setup.roles
        waited_s = roles.waited_s
        with clock("update"):
            learned = learner.learn(step, experience)
            measured |= learned.measured
            self.steps.learned(self._run.whole(step, experience.history), measured)
            measured |= learner.learn_head(learned.batch)
        waited_s = roles.waited_s - waited_s
        clock.seconds["update"] -= waited_s
        clock.seconds["update/compile"] = waited_s
        measured |= learner.describe(experience.groups, learned, clock.seconds["update"])
        return learned

    def load(self, step: int, learned: Learned, experience: Experience) -> None:
        """Loads the updated policy for the next rollout."""
        params = self.learner.state.params
        with self.steps.clock("transfer"):
            self.generator.load(params)
            if step % COMPARE_EVERY == 1 or self._config.rollout.check_integrity:
                experience.measured["train/transfer_gap"] = self.generator.compare(params)
        self.learner.note_skipped(step, learned)

    def complete(self, step: int, experience: Experience) -> None:
        """Does what is left of a step whose update is done: metrics, pages, checkpoint."""
        run, measured, last = self._run, experience.measured, experience.last
        if run.earlier is not None:
            run.earlier.put(experience.drawn)
        measured |= describe_memory(run.setup.devices)
        stages = self._stages.note(step)
        if step == self._compares_at:
            measured |= compared(run.setup, self.generator.planner, stages, self._notify)
        self.steps.write(step, measured)
        run.files.page.rollout(step, last.report.trace)
        if step == 1 or step % SAMPLES_EVERY == 0:
            few = run.completions.few(last.groups, last.rewards, last.scores)
            self.steps.metrics.samples(step, few)
            run.files.page.write()
        self.last = last
        self.steps.end(step, measured)
        self._unmoved.note(step, measured)

    def evaluate_if_due(self, step: int) -> None:
        if (every := self._config.eval.every) and step % every == 0:
            self.evaluate(step)

    def evaluate(self, step: int) -> None:
        """Measures and prints the held-out reward of the current policy."""
        if self._config.eval.every:
            found = self._run.evaluator.evaluate(step, self.generator.evaluate)
            self.steps.metrics.write(step, found.metrics)
            self._run.files.page.write()
            for line in (*(f"step {step}: {line}" for line in found.lines), *found.samples):
                self._notify(line)

    @property
    def _compares_at(self) -> int | None:
        """The iteration after which placements are compared; None: never. It is the second of this
        start that trains the policy."""
        skipped = max(self._run.first, self._config.critic.pretrain_steps)
        return skipped + 2 if self._config.placement.name == "auto" else None
