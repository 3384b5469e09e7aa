"""`python -m pat_jax.train`: GRPO whose rollout changes its tensor parallelism while it runs.

Wires the rooms together; the loop in `Run.iterate` is the whole algorithm.
"""

import itertools
import logging
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np

from pat_jax.checkpoint import Checkpointer
from pat_jax.cli import dump, parse, run_command
from pat_jax.config import RunConfig
from pat_jax.devices import configure
from pat_jax.engine.layout import Layout
from pat_jax.engine.report import RolloutReport
from pat_jax.files import replace_text
from pat_jax.generation import Generator, describe_rollouts
from pat_jax.memory import describe_memory, describe_peak
from pat_jax.metrics import METRICS_FILE, MetricsWriter, read_metrics
from pat_jax.models.hf_export import export
from pat_jax.models.policy import Params
from pat_jax.planning.lengths import LengthModel
from pat_jax.planning.planner import CostModelPlanner
from pat_jax.plot import plot_rollout
from pat_jax.profiling.lazy import LazyLayouts, first_layouts
from pat_jax.profiling.prepare import cost_planner, frozen, warm_up
from pat_jax.profiling.regret import planned_regret
from pat_jax.progress import Progress, summarize
from pat_jax.rl.advantages import group_advantages
from pat_jax.rl.batches import MicroBatch, length_grouped, to_supervised_batch, to_train_batch
from pat_jax.rl.reward_scorer import RewardScorer, Scoring
from pat_jax.rl.rewards import response_reader
from pat_jax.rl.types import Prompt, Rollout, RolloutGroup
from pat_jax.run_folder import CHECKPOINTS, CONFIG_FILE, check_run_dir, log_to, make_run_dir
from pat_jax.setup import (
    DTYPES,
    Setup,
    build,
    micro_shapes,
)
from pat_jax.stopwatch import Stopwatch

log = logging.getLogger("pat_jax")


def main() -> None:
    config = configuration(sys.argv[1:])
    folder = check_run_dir(config)
    setup = build(config, configure(config.devices))
    with RewardScorer(setup.task.reward, config.reward_timeout) as scorer:
        Run(config, folder, setup, scorer).run()


def configuration(argv: Sequence[str]) -> RunConfig:
    """The options; those of a resumed run are its own, unless given again."""
    config = parse(argv)
    if config.resume:
        check_run_dir(config)
        return parse(["--config", str(Path(config.run_dir) / CONFIG_FILE), *argv])
    if not config.run_dir:
        config = replace(config, run_dir=f"runs/{datetime.now():%Y%m%d-%H%M%S}")
    return config


class Run:
    """One run, from the first compilation to the last picture."""

    def __init__(self, config: RunConfig, folder: Path, setup: Setup, scorer: RewardScorer):
        self.config, self.folder, self.setup, self.scorer = config, folder, setup, scorer
        self.trainer, self.task = setup.trainer, setup.task
        make_run_dir(config, folder)
        replace_text(folder / CONFIG_FILE, dump(replace(config, resume=False)))
        self.checkpoints = Checkpointer(
            folder / CHECKPOINTS, config.checkpoint.max_to_keep, fingerprint=setup.fingerprint
        )
        log_to(folder / "run.log")
        self.progress = Progress(config.steps)
        self.stopwatch = Stopwatch()
        self.lazy: LazyLayouts | None = None

    def run(self) -> None:
        config = self.config
        self.compile()
        self.restore_or_start()
        resume_step = self.first_step + 1 if config.resume else None
        writer = MetricsWriter(self.folder, resume_step=resume_step)
        with writer as self.metrics, self.lazy or nullcontext():
            for step in range(self.first_step, config.steps):
                self.iterate(step)
            self.evaluate(config.steps)
        self.finish()

    def iterate(self, step: int) -> None:
        """Prompts to rollouts to rewards to advantages to an update to the next policy."""
        config, clock = self.config, self.stopwatch
        if config.eval.every and step % config.eval.every == 0:
            self.evaluate(step)
        clock.reset()
        self.bring_in_layouts()
        prompts = self.task.train_batch(step, config.rollout.prompts_per_step)
        scoring = self.scoring(prompts, config.rollout.num_generations)
        with clock("rollout"):  # prompt -> rollout, switching inside; rewards of what has ended
            groups, report = self.generator.rollout(prompts, step, scoring.add)
        if self.lazy:
            self.lazy.end_rollout(config.steps - step - 1)
        with clock("reward"):
            rewards = scoring.rewards().reshape(len(groups), -1)  # waits for the last of them
        measured = describe_rollouts(groups, rewards, report) | self.hindsight(groups, report)
        measured["reward/hidden_seconds"] = scoring.hidden_seconds
        if config.train:
            batch = to_train_batch(
                groups,
                group_advantages(rewards, scale=config.algorithm.scale_rewards),
                mini_batch_size=config.algorithm.mini_batch_size,
                micro_shapes=self.shapes,
                aggregation=config.algorithm.loss_aggregation,
                truncated=config.algorithm.truncated,
            )
            self.generator.release()
            with clock("update"):
                self.state, result = self.trainer.update(self.state, batch, self.reference)
            with clock("transfer"):
                self.generator.load(self.state.params)  # the next rollout samples the new policy
            measured |= result.metrics | {"train/padding_efficiency": batch.padding_efficiency}
        self.report, measured = report, measured | clock.metrics("timing/")
        self.metrics.write(step + 1, measured)
        self.progress.step(step + 1, measured)
        if (step + 1) % config.checkpoint.every == 0 or step + 1 == config.steps:
            self.save(step + 1)

    def compile(self) -> None:
        """Every program of the run, in parallel; nothing is compiled after this and the warm-up."""
        start, config = time.perf_counter(), self.config
        if self.task.note:
            self.progress.print(self.task.note)
        for reason in self.setup.dropped:
            log.info("layout dropped: %s", reason)
        for line in describe_memory(self.setup.memory, config.rollout):
            log.info("%s", line)
        self.progress.print(
            f"run folder {self.folder}; layouts {', '.join(map(str, self.setup.layouts))}"
        )
        self.first_layouts = first_layouts(config, self.setup)

        def show(name: str) -> Callable[[int, int], None]:
            return lambda done, total: self.progress.stage(f"compiling {name} {done}/{total}")

        self.setup.engine.compile(show("rollout"), self.first_layouts)
        self.trainer.compile(show("training"))
        self.progress.print(f"compiled in {time.perf_counter() - start:.1f} s")

    def restore_or_start(self) -> None:
        """Parameters, optimizer and history: from the checkpoint, or from the start."""
        config = self.config
        self.shapes = micro_shapes(config, self.trainer.layout.split.dp)
        lengths = LengthModel.empty(config.rollout.max_completion_length)
        if config.resume and self.checkpoints.latest_step() is not None:
            abstract: dict[str, Any] = {"train": self.trainer.abstract_state}
            if self.trainer.has_reference:
                abstract["reference"] = self.trainer.abstract_params
            self.first_step, saved, meta = self.checkpoints.restore(abstract)
            self.state, self.reference = saved["train"], saved.get("reference")
            lengths = LengthModel.from_json(meta["lengths"])
            self.progress.print(f"resumed after step {self.first_step}")
        else:
            self.first_step, self.reference = 0, None
            self.state = self.trainer["init_state"](self.setup.initial_params(config))
            self.warm_start()
            if self.trainer.has_reference:
                self.reference = self.trainer["copy"](self.state.params)
        self.warm_up(lengths)

    def warm_start(self) -> None:
        """A short supervised stage; the optimizer of the reinforcement stage starts afresh."""
        config = self.config.warm_start
        start = time.perf_counter()
        for step, shown in zip(range(config.steps), self.demonstration_batches(), strict=False):
            self.state, result = self.trainer.supervised_step(self.state, shown)
            loss = result.metrics["train/loss"]
            self.progress.stage(f"warm start {step + 1}/{config.steps} loss {loss:.3f}")
        if config.steps:
            self.state = self.trainer["init_state"](self.state.params)
            seconds = time.perf_counter() - start
            self.progress.print(f"warm start: {config.steps} supervised steps in {seconds:.1f} s")

    def demonstration_batches(self) -> Iterator[Sequence[MicroBatch]]:
        """Batches of demonstrations of like length: a long one does not pad the short ones."""
        size = self.config.warm_start.batch_size
        assert self.task.demonstrations is not None  # check_task refuses a warm start without
        for draw in itertools.count():
            shown = self.task.demonstrations(draw, 8 * size)
            batches = length_grouped(shown, self.shapes, max_rows=size)
            for i in np.random.default_rng((self.config.seed, draw)).permutation(len(batches)):
                yield to_supervised_batch(batches[i], micro_shapes=self.shapes)

    def warm_up(self, lengths: LengthModel) -> None:
        """Runs every program of the rollout; the times it takes are the planner's profile."""
        config, setup = self.config, self.setup
        self.progress.stage("warming up")
        start = time.perf_counter()
        warmup = warm_up(setup, self.first_layouts, self.weights_in)
        latency = frozen(config, setup, self.folder, warmup.measured, self.progress.print)
        planner = setup.scripted or cost_planner(config, setup, latency, lengths)
        if len(self.first_layouts) < len(setup.layouts) and isinstance(planner, CostModelPlanner):
            left = config.steps - self.first_step
            self.lazy = LazyLayouts(setup, planner, warmup, self.first_layouts, left)
        self.generator = Generator(
            setup.engine, self.trainer, planner, config.rollout, config.seed, lengths
        )
        self.generator.load(self.state.params)
        seconds, names = time.perf_counter() - start, ", ".join(map(str, self.first_layouts))
        self.progress.print(f"warmed up and profiled {names} in {seconds:.1f} s")

    def weights_in(self, layout: Layout) -> Params:
        return self.trainer.transfer(self.state.params, layout)

    def bring_in_layouts(self) -> None:
        """What has been compiled meanwhile is warmed up: from now on plans may lead there."""
        if not (self.lazy and self.lazy.is_due):
            return
        with self.stopwatch("warm_up"):
            self.generator.release()
            for line in self.lazy.bring_in(self.weights_in):
                self.progress.print(line)
            self.generator.load(self.state.params)

    def hindsight(self, groups: Sequence[RolloutGroup], report: RolloutReport) -> dict[str, float]:
        """The regret of the planned path, by the planner's own prices and the lengths that came."""
        planner = self.generator.planner
        if not isinstance(planner, CostModelPlanner):
            return {}
        rollouts = [one for group in groups for one in group.rollouts]
        lengths = [(len(one.prompt.tokens), len(one.tokens)) for one in rollouts]
        capacity = self.setup.engine.capacity
        regret = planned_regret(
            planner, self.config.rollout, lengths, report.trace(), capacity=capacity
        )
        return {"rollout/regret": regret}

    def scoring(self, prompts: Sequence[Prompt], num_samples: int) -> Scoring[Rollout]:
        """Of as many responses to each prompt; each is scored from the moment it ends."""
        texts = [prompt.text for prompt in prompts for _ in range(num_samples)]
        return self.scorer.begin(texts, response_reader(prompts, self.task.tokenizer))

    def evaluate(self, step: int) -> None:
        """Held-out reward of the current policy."""
        if not self.config.eval.every:
            return
        start, prompts = time.perf_counter(), self.task.heldout
        scoring = self.scoring(prompts, 1)
        self.generator.evaluate(prompts, self.config.eval.temperature, scoring.add)
        reward = float(scoring.rewards().mean())
        seconds = time.perf_counter() - start
        self.metrics.write(step, {"eval/reward": reward, "eval/seconds": seconds})
        self.progress.print(f"step {step}: held-out reward {reward:.3f} ({len(prompts)} prompts)")

    def save(self, step: int) -> None:
        """After the step's metrics are written: a run resumed from here does not repeat it."""
        start = time.perf_counter()
        self.metrics.flush()
        state = {"train": self.state}
        if self.reference is not None:
            state["reference"] = self.reference
        self.checkpoints.save(step, state, {"lengths": self.generator.lengths.to_json()})
        self.metrics.write(step, {"timing/checkpoint": time.perf_counter() - start})

    def finish(self) -> None:
        config = self.config
        self.checkpoints.wait()
        self.checkpoints.close()
        self.progress.close()
        log.info("%s", describe_peak(self.setup.memory, self.setup.engine.mesh.devices.flat))
        if config.steps > self.first_step:
            plot_rollout(self.report.trace(), self.folder / "rollout.png")
        if config.checkpoint.export_dir:
            source = config.model if Path(config.model).is_dir() else None
            export(
                config.checkpoint.export_dir,
                self.setup.policy,
                self.state.params,
                DTYPES[config.compute_dtype],
                tokenizer_dir=source,
            )
        print(summarize(read_metrics(self.folder / METRICS_FILE)))
        print(f"metrics, checkpoint, configuration and rollout.png are in {self.folder}")


if __name__ == "__main__":
    run_command(main)
