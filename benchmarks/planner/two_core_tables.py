"""What the stages of an iteration take on a core or two, and the iterations that this predicts.

Rollouts are replayed from decode steps that a run has measured while warming up. Passes are measured once
the programs have run. The order of stages is that of the planner (`profiling/placement`).
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pat_jax.planning import stage_names
from pat_jax.planning.planner.planner import CostModelPlanner, Planner
from pat_jax.planning.types import Split
from pat_jax.profiling.capacity.ended_parts import EndedParts, streams_of
from pat_jax.profiling.capacity.update_batches import Packed
from pat_jax.profiling.placement.candidates import Overlap
from pat_jax.profiling.placement.iteration import Iteration, Schedule, Stage
from pat_jax.profiling.placement.schedule import scheduled
from pat_jax.profiling.predict.update_times import Seconds
from pat_jax.profiling.simulate.comparison import Replayed
from pat_jax.profiling.simulate.machine import Machine, Workload
from pat_jax.profiling.simulate.simulator import replayed
from pat_jax.rl.batches.batches import TrainBatch, to_read_batch
from pat_jax.rl.batches.packing import Shape
from pat_jax.run.collect import Experience
from pat_jax.run.learning import Learner
from pat_jax.run.setup import Setup
from pat_jax.training.trainer import Trainer

REPEATS = 3  # of each pass
REWARD = stage_names.predictions(stage_names.SCORES, "reward model")
ROLLOUT, OTHERS = (0,), (1,)  # cores


def replayed_rollout(setup: Setup, planner: Planner, workload: Workload) -> dict[str, Any]:
    """The seconds of a rollout by its measured steps, and those after which each response ends."""
    assert isinstance(planner, CostModelPlanner)
    machine = Machine.of(
        planner.latency,
        planner.splits,
        setup.config.rollout,
        capacity=setup.engine.capacity,
        memory=setup.memory,
        has_pools=True,
    )
    report, ended_s = replayed(workload, planner, machine)
    return {"rollout_s": report.total_s, "ended_s": ended_s.tolist()}


@dataclass(frozen=True)
class Passes:
    """Seconds of all passes over an iteration's responses on one core."""

    reads: Mapping[str, float]
    gradients: Mapping[str, float]  # by trained role, in the order of a run
    steps: Mapping[str, float]
    batch_s: float  # of the host: advantages, and packing
    micro_shapes: Sequence[Shape]


def passes(setup: Setup, learner: Learner, found: Experience) -> Passes:
    """Runs all passes over the responses of the last iteration, but the reward model's."""
    roles, states = setup.roles, learner.states
    responses = [one for group in found.groups for one in group.rollouts]
    batch = to_read_batch(responses, roles.micro_shapes)
    reads, columns = {}, {}
    for one in roles.predictions(lambda: states):
        reads[one.name], columns[one.column] = _timed(
            lambda one=one: one.added_to(batch).by_response(one.column)
        )
    made_of = found.groups, found.rewards, found.by_function, columns
    batch_s, (whole, *_) = _timed(lambda: learner.batch_of(*made_of))
    gradients, steps = {}, {}
    for role in roles.trained:
        gradients[role.name], steps[role.name] = _training(role, states[role.name], whole)
    return Passes(reads, gradients, steps, batch_s, roles.micro_shapes)


def _training(role: Trainer, state: Any, batch: TrainBatch) -> tuple[float, float]:
    """Seconds of a role's gradients, and of its optimizer's step on a copy of its state."""
    (mini,) = batch.mini_batches

    def summed() -> Any:
        grads, sums = role.no_gradients(state)
        for micro in mini:
            grads, sums = role.add_gradients(state, micro, grads, sums)
        return grads, sums

    seconds, _ = _timed(summed)
    taken = []
    for _ in range(REPEATS):
        copied, (grads, sums) = jax.block_until_ready((jax.tree.map(jnp.copy, state), summed()))
        start = time.perf_counter()
        jax.block_until_ready(role.apply_gradients(copied, grads, sums, np.float32(1))[0])
        taken.append(time.perf_counter() - start)
    return seconds, median(taken)


def _timed(run: Callable[[], Any]) -> tuple[float, Any]:
    """The median of seconds of some calls after a first one, and what the last returned."""
    jax.block_until_ready(found := run())
    taken = []
    for _ in range(REPEATS):
        start = time.perf_counter()
        jax.block_until_ready(found := run())
        taken.append(time.perf_counter() - start)
    return median(taken), found


@dataclass(frozen=True)
class Tables:
    """What the stages of a run with rollouts on another core take.

    Args:
      rest_s: of the host after the rollout, whatever the overlap.
    """

    workload: Workload
    rollout_s: float
    ended_s: Sequence[float]
    passes: Passes
    reward_s: float
    transfer_s: float
    rest_s: float

    @classmethod
    def of(
        cls,
        workload: Workload,
        rollout: tuple[float, Sequence[float]],
        passes: Passes,
        seconds: float,
        clock: Mapping[str, float],
    ) -> "Tables":
        """
        Args:
          seconds, clock: of an iteration without overlap, and of its stages.
        """
        known = (passes.reads, passes.gradients, passes.steps)
        update_s = sum(sum(each.values()) for each in known)
        rest_s = seconds - clock["rollout"] - clock["reward"] - clock["transfer"] - update_s
        return cls(workload, *rollout, passes, clock["reward"], clock["transfer"], max(0.0, rest_s))

    def predicted(self, overlap: Overlap) -> Schedule:
        """The planner's schedule of an iteration."""
        ended_s, layout = np.array(self.ended_s), Split(1, 1)
        rollout = Replayed(self.workload, self.rollout_s, ended_s, is_pressed=False, first=layout)
        early, sums, shapes = overlap != "none", overlap == "gradients", self.passes.micro_shapes
        read, trained = {REWARD: self.reward_s, **self.passes.reads}, self.passes.gradients
        if sums:  # the batch of each group is made where its gradients are
            first = next(iter(trained))
            trained = {**trained, first: trained[first] + self.passes.batch_s}

        def pack(some: Workload) -> Packed:
            return Packed.of(some, some.size, shapes, 1)

        busy = sum(read.values()), sums * sum(trained.values())
        parts = streams_of(rollout, pack, pack, *(Seconds(products=s) for s in busy))

        def stage(name: str, seconds: float, of: EndedParts | None, *needs: str) -> Stage:
            if of is None:
                return Stage(name, OTHERS, (seconds,), needs)
            return Stage(name, OTHERS, of.seconds(Seconds(products=seconds)), needs, of.ready_s)

        reads, gradients = parts.reads if early else None, parts.gradients if sums else None
        stages = [stage(name, seconds, reads) for name, seconds in read.items()]
        named = {name: stage_names.gradients(name) for name in trained}
        stages += [stage(named[x], trained[x], gradients, *read) for x in trained]
        steps = [
            stage(stage_names.step(x), seconds, None, named[x])
            for x, seconds in self.passes.steps.items()
        ]
        before = [one.name for one in steps]
        rest = Stage("host", OTHERS, (self.rest_s,), tuple(before))
        transfer = Stage(stage_names.TRANSFER, (*ROLLOUT, *OTHERS), (self.transfer_s,), ("host",))
        return scheduled(Iteration(ROLLOUT, self.rollout_s, (*stages, *steps, rest, transfer)))
