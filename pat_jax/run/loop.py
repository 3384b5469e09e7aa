"""The loop of reinforcement learning: `Run.iterate` is the whole algorithm.

Wires the rooms together. Knows no option of the command line and no array.
"""

import logging
import time
from collections.abc import Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

from pat_jax.common.hosts.together import company
from pat_jax.common.stopwatch import Stopwatch
from pat_jax.engine.record.plot import plot_rollout
from pat_jax.engine.sizing.memory_words import describe_peak
from pat_jax.layout.layout import Layout
from pat_jax.models.policy import Params
from pat_jax.planning.lengths.model import LengthModel
from pat_jax.planning.planner.planner import CostModelPlanner
from pat_jax.rl.batches.batches import TrainBatch
from pat_jax.rl.batches.types import RolloutGroup
from pat_jax.rl.rewards.responses import response_reader
from pat_jax.rl.rewards.scorer import RewardScorer
from pat_jax.run.checkpoints.earlier_texts import earlier_iterations, recall
from pat_jax.run.checkpoints.exit_head_state import learned_head
from pat_jax.run.checkpoints.journal import Unfinished
from pat_jax.run.checkpoints.skipped_steps import Skipped
from pat_jax.run.collect import Collector, Drawn, Experience
from pat_jax.run.evaluation import Evaluator
from pat_jax.run.generation import Generator
from pat_jax.run.learning import nothing_to_learn, training_batch
from pat_jax.run.logging.completions import Completions
from pat_jax.run.logging.speed import describe_memory, describe_update, sequence_lengths
from pat_jax.run.logging.unmoved import Unmoved
from pat_jax.run.process.folder import CHECKPOINTS
from pat_jax.run.process.open_run import Kept, OpenRun
from pat_jax.run.process.stop_signals import Stopped, StopSignals
from pat_jax.run.results.export import export_policy
from pat_jax.run.scoring import try_out
from pat_jax.run.setup import Setup
from pat_jax.run.start.compiling import announce, compile_run
from pat_jax.run.start.init_state import begin
from pat_jax.run.start.lazy_layouts import LazyLayouts, first_layouts
from pat_jax.run.start.prepare import cost_planner, frozen, warm_up
from pat_jax.training.build import learning_rates, micro_shapes
from pat_jax.training.trainer import UpdateResult

log = logging.getLogger(__name__)

# Updates of which one is compared with the rollout by what it says; bits are compared in all.
COMPARE_EVERY = 16


class Run:
    """One run, from the first compilation to the last picture."""

    def __init__(self, setup: Setup, scorer: RewardScorer, signals: StopSignals):
        self.setup, self.scorer, self.signals = setup, scorer, signals
        self.config = config = setup.config
        self.trainer, self.task = setup.trainer, setup.task
        self.devices = list(setup.engine.mesh.devices.flat)
        self.learning_rates = learning_rates(config)
        self.open = OpenRun(
            config,
            "train",
            steps=config.steps,
            fingerprint=setup.fingerprint,
            save_beside=self.save_beside,
        )
        self.folder, self.progress = self.open.folder, self.open.progress
        self.page = self.open.page
        self.stopwatch = Stopwatch()
        made_of = setup.task.tokenizer, self.folder, self.progress.print
        self.completions = Completions(*made_of, is_asked=config.log_completions)
        checkpoints = Path(config.run_dir) / CHECKPOINTS
        self.unfinished = Unfinished(self.folder, checkpoints, is_on=config.keeps_unfinished)
        self.earlier = earlier_iterations(config, setup)
        self.skipped = Skipped(self.folder, config.optimizer.max_skipped, self.progress.print)
        self.unmoved = Unmoved(self.progress.print, config.rollout.max_completion_length)
        self.lazy: LazyLayouts | None = None
        self.steps_done: int | None = None  # None: there is nothing yet that is worth keeping
        signals.last_words = self.open.last_words

    def run(self) -> None:
        try:
            first, *_ = self.task.train.batch(0, self.config.rollout.prompts_per_step)
            size = self.config.rollout.num_generations
            try_out(self.scorer, first, self.task.columns, size, self.progress)
            self.page.write()
            self.compile()
            self.begin()
            self.learn()
            self.finish()
        except Stopped as stop:
            self.open.stop(stop, self.steps_done, self.kept)
            raise

    def learn(self) -> None:
        self.progress.start(self.first_step)
        self.has_learned(self.first_step, {})
        with (
            self.page.kept(self.first_step),
            self.open.metrics(self.first_step) as self.metrics,
            self.completions,
            self.lazy or nullcontext(),
            self.open.saved_at_an_error(self.signals, self.last),
        ):
            for step in range(self.first_step, self.config.steps):
                self.iterate(step)
            self.evaluate(self.config.steps)

    def iterate(self, step: int) -> None:
        """Prompts to rollouts to rewards to advantages to an update to the next policy."""
        config, clock = self.config, self.stopwatch
        if config.eval.every and step % config.eval.every == 0:
            self.evaluate(step)
        clock.reset()
        self.bring_in_layouts()
        experience = self.collector.collect(step, self.generator, clock)
        if self.lazy:
            self.lazy.end_rollout(config.steps - step - 1)
        last, measured = experience.last, experience.measured
        with self.signals.held():  # from here to its end a step is carried through
            if config.train:
                self.update(step + 1, experience, measured)
            else:
                self.has_learned(step + 1, measured)
            if self.earlier is not None:
                self.earlier.put(experience.drawn)
            measured |= describe_memory(self.devices) | clock.metrics
            self.end_step(step + 1, last, measured | {"timing/step": clock.elapsed})

    def update(self, step: int, experience: Experience, measured: dict[str, Any]) -> None:
        """To the next policy, which the next rollout samples; adds to what was measured."""
        config, clock, groups = self.config, self.stopwatch, experience.groups
        if why := nothing_to_learn(config, groups, experience.rewards):
            self.progress.print(f"step {step}: {why}")
        self.generator.release()
        waited_s = self.trainer.programs.waited_s
        with clock("update"):
            found = groups, experience.rewards
            policies = self.state, self.reference
            batch, learned = training_batch(config, self.trainer, self.shapes, *found, *policies)
            self.state, result = self.trainer.update(self.state, batch, self.reference)
            measured |= learned | result.metrics
            self.has_learned(step, measured)
            if self.exit_head:
                measured |= self.exit_head.trainer.learn(self.state.params, batch)
        waited_s = self.trainer.programs.waited_s - waited_s
        clock.seconds["update"] -= waited_s
        clock.seconds["update/compile"] = waited_s
        measured |= {"train/padding_efficiency": batch.padding_efficiency}
        measured |= self.describe_update(groups, batch, result)
        with clock("transfer"):
            self.generator.load(self.state.params)
            if step % COMPARE_EVERY == 1 or config.rollout.check_integrity:
                measured["train/transfer_gap"] = self.generator.compare(self.state.params)
        self.skipped.note(step, batch.mini_batches, result.applied)

    def has_learned(self, step: int, measured: dict[str, Any]) -> None:
        """From here on this is the step that is saved, whatever fails; what is measured later is added."""
        self.steps_done, self.unwritten = step, measured
        # Of whole steps: what an abandoned one has drawn is drawn again.
        self.whole = self.collector.totals, self.generator.lengths

    def describe_update(
        self, groups: Sequence[RolloutGroup], batch: TrainBatch, result: UpdateResult
    ) -> dict[str, float]:
        rate = self.learning_rates(max(0, result.updates_applied - 1))
        model, seconds = self.setup.policy.config, self.stopwatch.seconds["update"]
        lora, lengths = self.trainer.trained.lora, sequence_lengths(groups)
        speed = describe_update(
            model,
            self.devices,
            lengths,
            batch.shared,
            passes=self.config.algorithm.num_iterations,
            seconds=seconds,
            adapter_weights=lora.num_weights if lora else None,
        )
        speed["train/shared_tokens"] = float(batch.shared.sum() / lengths.sum())
        return speed | {"train/learning_rate": float(rate)}

    def end_step(self, step: int, last: Drawn, measured: dict[str, Any]) -> None:
        self.drawn = last
        self.metrics.write(step, measured)
        self.unwritten = {}
        self.page.rollout(step, last.report.trace)
        if (every := self.config.log_samples_every) and (step == 1 or step % every == 0):
            few = self.completions.few(last.groups, last.rewards, last.scores)
            self.metrics.samples(step, few)
            self.page.write()
        self.progress.step(step, measured)
        self.unmoved.note(step, measured)
        if self.open.saves.is_due(step):
            self.open.save(step, self.kept(), self.metrics)

    def compile(self) -> None:
        announce(self.config, self.setup, self.progress)
        first = partial(first_layouts, self.config, self.setup)
        self.first_layouts = company().agree("layouts to compile", first)
        self.compiled = compile_run(self.config, self.setup, self.first_layouts, self.progress)

    def begin(self) -> None:
        """Parameters, optimizer and history: from the checkpoint, or from the start."""
        self.open.tell_changes()
        layout = self.trainer.layout
        self.shapes = micro_shapes(self.config, layout.split.dp, layout.platform)
        began = begin(self.config, self.setup, self.open)
        self.first_step, self.state, self.reference = began.steps_done, began.state, began.reference
        self.base_checksum = began.base_checksum
        parts = self.scorer, self.completions, self.progress
        self.collector = Collector(self.config, self.task, *parts, self.unfinished, began.totals)
        read = response_reader(self.task.columns, self.task.tokenizer)
        self.evaluator = Evaluator(self.config, self.task.heldout, read, *parts)
        self.exit_head = learned_head(self.config, self.setup, self.shapes)
        if self.exit_head and self.first_step and (lost := self.exit_head.restore(self.first_step)):
            self.progress.print(lost)
        recall(self.config, self.setup, self.earlier, began.steps_done, self.progress.print)
        self.warm_up(began.lengths)

    def save_beside(self, step: int) -> None:
        if self.earlier is not None:
            self.earlier.save(step)
        if self.exit_head is not None:
            self.exit_head.save(step)

    def warm_up(self, lengths: LengthModel) -> None:
        """Runs every program of the rollout; the times it takes are the planner's profile."""
        config, setup = self.config, self.setup
        self.progress.stage("warming up")
        start = time.perf_counter()
        warmup = warm_up(config, setup, self.first_layouts, self.weights_in)
        say = self.progress.print
        latency = company().agree(
            "profile", lambda: frozen(config, setup, self.folder, warmup.measured, say)
        )
        planner = setup.scripted or cost_planner(config, setup, latency, lengths)
        if len(self.first_layouts) < len(setup.layouts) and isinstance(planner, CostModelPlanner):
            self.lazy = LazyLayouts(setup, planner, warmup, self.first_layouts)
        self.generator = Generator(
            setup.engine,
            self.trainer,
            planner,
            config.rollout,
            config.seed,
            lengths,
            self.exit_head and self.exit_head.trainer,
            self.earlier and self.earlier.responses,
        )
        self.generator.load(self.state.params)
        self.generator.compare(self.state.params)
        seconds, names = time.perf_counter() - start, ", ".join(map(str, self.first_layouts))
        self.progress.print(f"warmed up and profiled {names} in {seconds:.1f} s")

    def weights_in(self, layout: Layout) -> Params:
        return self.trainer.transfer(self.state.params, layout)

    def bring_in_layouts(self) -> None:
        """What has been compiled meanwhile is warmed up: from now on plans may lead there."""
        if not (self.lazy and (due := self.lazy.due())):
            return
        with self.stopwatch("warm_up"):
            self.generator.release()
            for line in self.lazy.bring_in(due, self.weights_in):
                self.progress.print(line)
            frozen(self.config, self.setup, self.folder, self.lazy.warmup.measured, log.info)
            self.generator.load(self.state.params)

    def evaluate(self, step: int) -> None:
        """Held-out reward of the current policy."""
        if self.config.eval.every:
            found = self.evaluator.evaluate(step, self.generator.evaluate)
            self.metrics.write(step, found.metrics)
            self.page.write()
            for line in (*(f"step {step}: {line}" for line in found.lines), *found.samples):
                self.progress.print(line)

    def last(self) -> tuple[int, Kept]:
        """The last whole step, and what was measured in it."""
        assert self.steps_done is not None  # it is asked for while steps are made
        if self.unwritten:
            self.metrics.write(self.steps_done, self.unwritten)
        return self.steps_done, self.kept()

    def kept(self) -> Kept:
        totals, lengths = self.whole
        state: dict[str, Any] = {"train": self.state}
        if self.reference is not None:
            state["reference"] = self.reference
        meta: dict[str, Any] = {"lengths": lengths.to_json(), "base_checksum": self.base_checksum}
        return state, meta | {"problems": self.task.checksums} | totals.to_json()

    def finish(self) -> None:
        config, plan = self.config, ""
        if config.steps > self.first_step:
            plan = self.drawn.report.first_plan
            with self.signals.held():
                self.open.save_last(config.steps, self.kept())
            self.unfinished.finish()
            trace = self.drawn.trace(self.setup.engine.capacity)
            plot_rollout(trace, self.folder / "rollout.png")
        self.open.close()
        log.info("%s", describe_peak(self.setup.memory, self.devices, self.compiled.update))
        if config.checkpoint.export_dir:
            step = max(config.steps, self.first_step)
            trained, form = self.trainer.trained, config.lora.export
            export_policy(config, trained, self.state.params, step, form)
        self.open.tell_end(self.compiled.seconds, plan)
