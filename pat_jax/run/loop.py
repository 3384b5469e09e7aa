"""The loop of reinforcement learning: `Run.iterate` is the whole algorithm.

With `--placement.lag 1`, `late_updates.py` has its parts in another order. Connects the packages.
Knows no option of the command line and no array.
"""

import logging
import time
from contextlib import ExitStack, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

from pat_jax.common.hosts.together import process_group
from pat_jax.common.stopwatch import Stopwatch
from pat_jax.common.timeline import recorded
from pat_jax.config.run import RunConfig
from pat_jax.engine.record.plot import plot_rollout
from pat_jax.engine.sizing.memory_words import describe_peak
from pat_jax.layout.layout import Layout
from pat_jax.models.policy import Params
from pat_jax.planning.lengths.model import LengthModel
from pat_jax.rl.rewards.responses import response_reader
from pat_jax.rl.rewards.scorer import RewardScorer
from pat_jax.run.checkpoints.earlier_texts import earlier_iterations, recall
from pat_jax.run.checkpoints.journal import RolloutJournal
from pat_jax.run.collect import Collector, Drawn, Experience, History
from pat_jax.run.early_columns import EarlyColumns
from pat_jax.run.evaluation import Evaluator
from pat_jax.run.generation import Generator
from pat_jax.run.lanes import open_lanes
from pat_jax.run.late_updates import LateUpdates
from pat_jax.run.learning import Learned, Learner, nothing_to_learn
from pat_jax.run.logging.completions import Completions
from pat_jax.run.logging.other_placements import compared
from pat_jax.run.logging.speed import describe_memory
from pat_jax.run.logging.stage_log import StageLog
from pat_jax.run.logging.unmoved import Unmoved
from pat_jax.run.own_reads import OwnReads
from pat_jax.run.process.folder import CHECKPOINTS
from pat_jax.run.process.open_run import Kept, OpenRun
from pat_jax.run.process.steps import Steps
from pat_jax.run.process.stop_signals import StopSignals
from pat_jax.run.results.export import export_roles
from pat_jax.run.reward_models import load_reward_models
from pat_jax.run.scoring import try_out
from pat_jax.run.setup import Setup
from pat_jax.run.start.compiling import announce, compile_run
from pat_jax.run.start.init_state import begin
from pat_jax.run.start.prepare import cost_planner, frozen, warm_up
from pat_jax.training.roles import States

log = logging.getLogger(__name__)

# One transfer in so many is checked by a token's log-probability too; checksums check them all.
COMPARE_EVERY = 16


class Run:
    """One training run, from compilation to the last picture."""

    def __init__(self, setup: Setup, scorer: RewardScorer, signals: StopSignals):
        self.setup, self.scorer, config = setup, scorer, setup.config
        self.open = OpenRun(
            config,
            "train",
            steps=config.steps,
            fingerprint=setup.fingerprint,
            save_beside=self.save_beside,
        )
        self.steps = Steps(self.open, signals, self.kept)
        notify = self.open.progress.print
        made_of = setup.task.tokenizer, self.open.folder, notify
        self.completions = Completions(*made_of, is_asked=config.log_completions)
        self.earlier = earlier_iterations(config, setup)
        self.unmoved = Unmoved(notify, config.rollout.max_completion_length)
        self.lanes = ExitStack()
        self.late: LateUpdates | None = None  # with `--placement.lag 1`

    @property
    def config(self) -> RunConfig:
        return self.setup.config

    def run(self) -> None:
        with self.steps.kept_at_a_stop(), self.lanes:
            task, rollout = self.setup.task, self.config.rollout
            (first,) = task.train.first(1)
            progress = self.open.progress
            try_out(self.scorer, first, task.columns, rollout.num_generations, progress)
            self.open.page.write()
            self.compile()
            self.begin()
            self.learn()
            self.finish()

    def learn(self) -> None:
        self.has_learned(self.steps.first, {}, (self.collector.totals, self.generator.lengths))
        iterate = self.late.iterate if self.late else self.iterate
        with self.completions, recorded() as timeline, self.steps.going_on():
            self.stages = StageLog(timeline, self.setup.places)
            with self.late.completed() if self.late else nullcontext():
                for step in range(self.steps.first, self.config.steps):
                    iterate(step)
            self.evaluate(self.config.steps)

    def iterate(self, step: int) -> None:
        """Runs one iteration: prompts, rollout, rewards, advantages, update."""
        self.evaluate_if_due(step)
        self.steps.clock.reset()
        experience = self.collect(step)
        with self.steps.signals.held():  # from here on the step is completed before a stop
            if self.config.train:
                self.update(step + 1, experience, experience.measured)
            else:
                self.has_learned(step + 1, experience.measured, experience.history)
            self.complete(step + 1, experience)

    def collect(self, step: int) -> Experience:
        """Returns what iteration `step`, from 0, learns from."""
        config, found = self.config, self.collector.collect(step, self.generator, self.steps.clock)
        if config.train and (why := nothing_to_learn(config, found.groups, found.rewards)):
            self.open.progress.print(f"step {step + 1}: {why}")
        return found

    def update(self, step: int, experience: Experience, measured: dict[str, Any]) -> None:
        """Updates the policy, and loads it for the next rollout. Adds metrics to `measured`."""
        self.generator.release()
        learned = self.learn_from(step, experience, measured, self.steps.clock)
        self.load(step, learned, measured)

    def learn_from(
        self, step: int, experience: Experience, measured: dict[str, Any], clock: Stopwatch
    ) -> Learned:
        """Updates the trained models. Runs beside a rollout with `--placement.lag 1`."""
        learner, roles, waited_s = self.learner, self.setup.roles, self.setup.roles.waited_s
        with clock("update"):
            learned = learner.learn(step, experience)
            measured |= learned.measured
            self.has_learned(step, measured, experience.history)
            measured |= learner.learn_head(learned.batch)
        waited_s = roles.waited_s - waited_s
        clock.seconds["update"] -= waited_s
        clock.seconds["update/compile"] = waited_s
        measured |= learner.describe(experience.groups, learned, clock.seconds["update"])
        return learned

    def load(self, step: int, learned: Learned, measured: dict[str, Any]) -> None:
        """Loads the updated policy for the next rollout."""
        params = self.learner.state.params
        with self.steps.clock("transfer"):
            self.generator.load(params)
            if step % COMPARE_EVERY == 1 or self.config.rollout.check_integrity:
                measured["train/transfer_gap"] = self.generator.compare(params)
        self.learner.note_skipped(step, learned)

    def complete(self, step: int, experience: Experience) -> None:
        """Does what is left of a step whose update is done."""
        if self.earlier is not None:
            self.earlier.put(experience.drawn)
        experience.measured.update(describe_memory(self.setup.devices))
        self.end_step(step, experience.last, experience.measured)

    def has_learned(self, step: int, measured: dict[str, Any], history: History) -> None:
        """Marks `step` as the one to save (`Steps.has_learned`)."""
        self.steps.has_learned(step, measured)
        # Of whole steps only: what an interrupted step has drawn is drawn again.
        self.history = history

    def end_step(self, step: int, last: Drawn, measured: dict[str, Any]) -> None:
        self.drawn = last
        stages = self.stages.note(step)
        if step == self.compares_at:
            notify = self.open.progress.print
            measured |= compared(self.setup, self.generator.planner, stages, notify)
        self.steps.write(step, measured)
        self.open.page.rollout(step, last.report.trace)
        if (every := self.config.log_samples_every) and (step == 1 or step % every == 0):
            few = self.completions.few(last.groups, last.rewards, last.scores)
            self.steps.metrics.samples(step, few)
            self.open.page.write()
        self.steps.end(step, measured)
        self.unmoved.note(step, measured)

    def compile(self) -> None:
        config, setup, progress = self.config, self.setup, self.open.progress
        announce(config, setup, progress)
        self.compiled = compile_run(config, setup, progress)

    def begin(self) -> None:
        """Restores parameters, optimizer and history from the checkpoint, or initializes them."""
        config, setup, progress = self.config, self.setup, self.open.progress
        self.open.tell_changes()
        began = begin(config, setup, self.open)
        load_reward_models(setup.reward_models)
        self.steps.first = began.steps_done
        parts = self.scorer, self.completions, progress
        checkpoints = Path(config.run_dir) / CHECKPOINTS
        unfinished = RolloutJournal(self.open.folder, checkpoints, is_on=config.keeps_unfinished)
        lanes = self.lanes.enter_context(open_lanes(config, setup, self.states))
        self.late = LateUpdates(self, lanes.late) if lanes.late else None
        reads = partial(EarlyColumns, lanes.readers) if lanes.readers else None
        if setup.places.is_split:
            reads = partial(OwnReads.of_run, config, setup.roles, self.states)
        self.collector = Collector(config, setup.task, *parts, unfinished, began.totals, reads)
        read = response_reader(setup.task.columns, setup.task.tokenizer)
        self.evaluator = Evaluator(config, setup.task.heldout, read, *parts)
        self.learner = Learner(config, setup, began, self.open)
        recall(config, setup, self.earlier, began.steps_done, progress.print)
        self.warm_up(began.lengths)

    def states(self) -> States:
        """The present states of trained roles."""
        return self.learner.states

    def save_beside(self, step: int) -> None:
        if self.earlier is not None:
            self.earlier.save(step)
        if self.learner.exit_head is not None:
            self.learner.exit_head.save(step)

    def warm_up(self, lengths: LengthModel) -> None:
        """Runs the compiled programs of the rollout; their measured times become the profile."""
        config, setup, folder = self.config, self.setup, self.open.folder
        notify = self.open.progress.print
        self.open.progress.stage("warming up")
        start = time.perf_counter()
        measured = warm_up(config, setup, self.weights_in)
        keep = partial(frozen, config, setup, folder, measured, notify)
        latency = process_group().agree("profile", keep)
        planner = setup.scripted or cost_planner(config, setup, latency, lengths)
        head, params = self.learner.exit_head, self.learner.state.params
        self.generator = Generator(
            setup.engine,
            setup.trainer,
            planner,
            config.rollout,
            config.seed,
            lengths,
            head and head.trainer,
            self.earlier and self.earlier.responses,
        )
        self.generator.load(params)
        self.generator.compare(params)
        names = ", ".join(map(str, setup.layouts))
        notify(f"warmed up and profiled {names} in {time.perf_counter() - start:.1f} s")

    def weights_in(self, layout: Layout) -> Params:
        return self.setup.trainer.transfer(self.learner.state.params, layout)

    def evaluate_if_due(self, step: int) -> None:
        if (every := self.config.eval.every) and step % every == 0:
            self.evaluate(step)

    def evaluate(self, step: int) -> None:
        """Measures and prints the held-out reward of the current policy."""
        if self.config.eval.every:
            found = self.evaluator.evaluate(step, self.generator.evaluate)
            self.steps.metrics.write(step, found.metrics)
            self.open.page.write()
            for line in (*(f"step {step}: {line}" for line in found.lines), *found.samples):
                self.open.progress.print(line)

    @property
    def compares_at(self) -> int | None:
        """The iteration after which placements are compared; None: never. It is the second of this
        start that trains the policy."""
        config = self.config
        skipped = max(self.steps.first, config.critic.pretrain_steps)
        return skipped + 2 if config.placement.name == "auto" else None

    def kept(self) -> Kept:
        totals, lengths = self.history
        meta = {"lengths": lengths.to_json(), "problems": self.setup.task.checksums}
        return self.learner.kept, meta | self.learner.meta | totals.to_json()

    def finish(self) -> None:
        config, setup, plan, first = self.config, self.setup, "", self.steps.first
        if config.steps > first:
            plan = self.drawn.report.first_plan
            self.steps.save_last(config.steps)
            self.collector.unfinished.finish()
            trace = self.drawn.trace(setup.engine.capacity)
            plot_rollout(trace, self.open.folder / "rollout.svg")
        self.open.close()
        log.info("%s", describe_peak(setup.memory, setup.devices, self.compiled.update))
        export_roles(config, setup.roles, self.learner.states, max(config.steps, first))
        self.open.tell_end(self.compiled.seconds, plan)
