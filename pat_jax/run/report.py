"""Reports each iteration once its stages are done: metrics, pages, samples, checkpoints.

With `--placement auto` it also predicts the seconds of an iteration with other placements.
"""

import logging
from collections.abc import Callable, Mapping
from dataclasses import replace

from pat_jax.common.errors import UserError
from pat_jax.common.hosts.together import process_group
from pat_jax.common.timeline import Timeline
from pat_jax.planning.placement import PlacementName
from pat_jax.planning.placement_seconds import described, placement_seconds
from pat_jax.planning.planner.planner import CostModelPlanner, Planner
from pat_jax.planning.stage_names import ROLLOUT
from pat_jax.run.collect import Drawn, Experience
from pat_jax.run.generation import full_load
from pat_jax.run.logging.speed import describe_memory
from pat_jax.run.logging.stage_log import log_stages
from pat_jax.run.logging.unmoved import Unmoved
from pat_jax.run.opened import Run
from pat_jax.run.process.open_run import Steps
from pat_jax.run.roles.placed_layouts import PlacedLayouts
from pat_jax.run.roles.places import Places
from pat_jax.run.start.setup import Setup

SAMPLES_EVERY = 20  # iterations between shown responses; the first iteration shows some, too


class Report:
    """Writes metrics, pages and checkpoints of a run.

    Attributes:
      last: last batch of the newest complete iteration, or None before the first.
    """

    def __init__(self, run: Run, steps: Steps, timeline: Timeline):
        self._run = run
        self._steps = steps
        self._timeline = timeline
        self._notify = run.files.progress.print
        self._unmoved = Unmoved(self._notify, run.config.rollout.max_completion_length)
        self.last: Drawn | None = None

    def complete(self, found: Experience) -> None:
        """Reports an iteration whose update is loaded, and saves a checkpoint if one is due."""
        run = self._run
        step = found.step
        measured = found.measured
        last = found.drawn[-1]
        if run.earlier is not None:
            run.earlier.put(group for one in found.drawn for group in one.groups)
        measured |= describe_memory(run.setup.devices)
        stages = log_stages(self._timeline, run.setup.places, step)
        # The second iteration since the process started that trains the policy.
        compares_at = max(run.first, run.config.critic.pretrain_steps) + 2
        if run.config.placement.name == "auto" and step == compares_at:
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


OTHERS: tuple[PlacementName, ...] = ("interleave", "separate", "split")
log = logging.getLogger(__name__)


def compared(
    setup: Setup, planner: Planner, stages: Mapping[str, float], notify: Callable[[str], None]
) -> dict[str, float]:
    """Prints and logs an iteration's predicted seconds with each placement. Returns metrics.

    Args:
      stages: measured seconds of each stage of an iteration.
    """
    config = setup.config
    names = allowed_placements(setup)
    growth = 1.0
    if isinstance(planner, CostModelPlanner):
        # Replicas are independent, so half of them take as long as all would with twice the sequences.
        count = config.rollout.num_responses
        loads = (full_load(config.rollout, n) for n in (count, 2 * count))
        whole_s, half_s = map(planner.rollout_s, loads)
        growth = half_s / whole_s
    elif "separate" in names:  # there is no prediction of a rollout on half of the devices
        names.remove("separate")
    waits = config.deterministic or config.teacher.top_k > 0
    found = placement_seconds(
        stages,
        growth * stages.get(ROLLOUT, 0.0),
        names,
        reads_as_they_end=process_group().is_alone and not waits,
    )
    notify(line := f"placement: {described(found)}")
    log.info("%s", line)
    return {f"placement/{name}": seconds for name, seconds in found.items()}


def allowed_placements(setup: Setup) -> list[PlacementName]:
    """Returns the placements except `flatten` that the run's models, devices and options allow."""
    config = setup.config
    found = list[PlacementName]()
    for name in OTHERS:
        try:
            asked = replace(config, placement=replace(config.placement, name=name))
            places = Places.of(asked.placement, setup.devices, asked.on_one_base)
            placed = PlacedLayouts.of(
                setup.policy.config,
                places,
                config.rollout,
                config.layout_choice,
                config.fsdp_size,
            )
        except UserError:
            continue
        # `interleave` moves reward models and frozen roles; without these it equals `flatten`.
        moves = name != "interleave" or setup.reward_models or setup.roles.readers
        sends_drafts = placed.carriers and setup.engine.specs.drafts.is_generated
        if moves and not places.placement.is_flat and not sends_drafts:
            found.append(name)
    return found
