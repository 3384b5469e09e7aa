"""Reports each iteration once its stages are done: metrics, pages, samples, checkpoints."""

from pat_jax.run.collect import Drawn, Experience
from pat_jax.run.logging.speed import describe_memory
from pat_jax.run.logging.stage_log import StageLog
from pat_jax.run.logging.unmoved import Unmoved
from pat_jax.run.opened import Run
from pat_jax.run.other_placements import compared
from pat_jax.run.process.steps import Steps

SAMPLES_EVERY = 20  # iterations between shown responses; the first iteration shows some, too


class Report:
    """Writes metrics, pages and checkpoints of a run.

    Attributes:
      last: last batch of the newest complete iteration, or None before the first.
    """

    def __init__(self, run: Run, steps: Steps, stages: StageLog):
        self._run = run
        self._steps = steps
        self._stages = stages
        self._notify = run.files.progress.print
        self._unmoved = Unmoved(self._notify, run.config.rollout.max_completion_length)
        self.last: Drawn | None = None

    def complete(self, found: Experience) -> None:
        """Reports an iteration whose update is loaded, and saves a checkpoint if one is due."""
        run = self._run
        step = found.step
        measured = found.measured
        last = found.last
        if run.earlier is not None:
            run.earlier.put(group for one in found.drawn for group in one.groups)
        measured |= describe_memory(run.setup.devices)
        stages = self._stages.note(step)
        if step == self._compares_at:
            measured |= compared(run.setup, run.generator.planner, stages, self._notify)
        self._steps.write(step, measured)
        run.files.page.rollout(step, last.report.trace)
        if step == 1 or step % SAMPLES_EVERY == 0:
            few = run.completions.few(last.groups, last.rewards, last.scores)
            self._steps.metrics.samples(step, few)
            run.files.page.write()
        self.last = last
        self._steps.end(step, measured)
        self._unmoved.note(step, measured)

    def evaluate_if_due(self, step: int) -> None:
        """Evaluates the policy after `step` iterations."""
        if (every := self._run.config.eval.every) and step % every == 0:
            self.evaluate(step)

    def evaluate(self, step: int) -> None:
        """Measures and prints the held-out reward of the current policy."""
        if self._run.config.eval.every:
            found = self._run.evaluator.evaluate(step, self._run.generator.evaluate)
            self._steps.metrics.write(step, found.metrics)
            self._run.files.page.write()
            for line in (*(f"step {step}: {line}" for line in found.lines), *found.samples):
                self._notify(line)

    @property
    def _compares_at(self) -> int | None:
        """The iteration after which placements are compared, or None without `--placement auto`:
        the second since the process started that trains the policy."""
        config = self._run.config
        skipped = max(self._run.first, config.critic.pretrain_steps)
        return skipped + 2 if config.placement.name == "auto" else None
