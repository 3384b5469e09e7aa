"""The loop of a rollout: from sequences that wait to sequences that are done, moving on the way.

The planner decides, a move carries its decision out, a burst runs, the report has what came of both.
Knows nothing about text or rewards, nor whether it runs on devices or on a simulated clock.
"""

from collections.abc import Callable, Generator
from dataclasses import dataclass, replace

import numpy as np

from pat_jax.engine.controller import Controller
from pat_jax.engine.executor import Executor
from pat_jax.engine.orders import Burst
from pat_jax.engine.record.report import RolloutReport
from pat_jax.planning.planner.planner import Planner
from pat_jax.planning.types import Moved, Plan, Ran, way

Tell = Callable[[str], None]
HasEnough = Callable[[int], bool]


def silent(text: str) -> None:
    """For replays."""
    del text


def rollout(
    controller: Controller,
    executor: Executor,
    planner: Planner,
    report: RolloutReport,
    has_enough: HasEnough | None = None,
    tell: Tell = silent,
) -> Generator[np.ndarray, None, None]:
    """Yields after each burst the sequences that have ended, int[ended].

    Args:
      report: filled in on the way; whole when the last sequences have been taken.
      has_enough: asked after each burst of every live sequence; where it says True that one ends.
      tell: hears of plans and switches, a sentence each.
    """
    loop, running = _Loop(controller, executor, planner, report, tell), None
    try:
        while controller.has_work:
            if running is None:
                loop.admit()
            plan = loop.decide()
            if running is None:
                if plan.moves_from(controller.split):
                    plan = loop.move(plan)
                running = loop.launch(plan)
            following = loop.launch_behind(running, plan)
            yield loop.collect(running, has_enough)
            running = following
    finally:  # also where nobody takes the rest
        executor.release()
    report.finish(controller, executor.clock)
    for sentence in report.words:
        tell(sentence)


@dataclass
class _Loop:
    """The parts of one rollout, each under its stage of the clock."""

    controller: Controller
    executor: Executor
    planner: Planner
    report: RolloutReport
    tell: Tell
    began: float = 0.0  # seconds on the clock when the running burst did

    def admit(self) -> None:
        """Pages and rows for the next steps, and the prefill of those that wait."""
        with self.executor.clock("prefill"):
            work = self.controller.admit()
            self.report.add_prefill(work, self.executor.prefill(work))

    def decide(self) -> Plan:
        with self.executor.clock("plan"):
            plan = self.controller.decide(self.planner)
        if not self.report.first_plan and plan.reason:
            self.report.first_plan = plan.reason
            self.tell(f"first plan for {len(self.controller.table)} sequences: {plan.reason}")
        return plan

    def move(self, plan: Plan) -> Plan:
        """Weights, cache and rows to the plan's layout or replicas: the contribution, in four lines.

        Returns:
          What is left of the plan, to be decoded.
        """
        controller, executor, report = self.controller, self.executor, self.report
        kind = "switch" if plan.group is None else "balance"
        began, fullest = executor.clock.elapsed, controller.table.fullest
        with executor.clock(kind):
            relocation = controller.leave(plan)
            arrival = executor.relocate(relocation)
            work, waits = controller.arrive(relocation, arrival.new_page)
            report.add_prefill(work, executor.recompute(relocation, work, waits))
        seconds = executor.clock.elapsed - began
        carry = way(len(work.spans.sequence) + int(waits.sum()), relocation.load.live)
        levels = fullest, controller.table.fullest
        report.add_move(plan, relocation, arrival, carry, levels, began, seconds)
        self.tell(f"{kind}: {plan.reason}; took {seconds:.3f} s")
        is_whole = plan.group is None or bool((relocation.group == plan.group).all())
        self.planner.observe(Moved(plan, seconds, carry, is_whole))
        return replace(plan, group=None)

    def launch(self, plan: Plan) -> Burst:
        """The next burst, while none runs."""
        with self.executor.clock("schedule"):
            self.controller.fit()
        self.began = self.executor.clock.elapsed
        with self.executor.clock("decode"):
            burst = self.controller.burst(plan)
            self.executor.launch(burst)
        return burst

    def launch_behind(self, running: Burst, plan: Plan) -> Burst | None:
        """The burst after the running one, before its results are known; None where that cannot be."""
        controller = self.controller
        if not controller.runs_ahead or plan.moves_from(controller.split):
            return None
        with self.executor.clock("schedule"):
            following = controller.burst_behind(running, plan)
            if following is not None:
                self.executor.launch(following)
        return following

    def collect(self, running: Burst, has_enough: HasEnough | None) -> np.ndarray:
        """Takes over what a burst did; returns the sequences that ended, int[ended]."""
        controller, executor = self.controller, self.executor
        clock, live = executor.clock, len(controller.table.live)
        with clock("decode"):
            output, is_timed = executor.collect()
            done = controller.collect(output)
            executor.wipe(done.spoilt)
        if done.steps:
            shape, seconds = running.shape, clock.elapsed - self.began
            ran = Ran(*shape[:3], live, done.held, done.steps, seconds, shape.budget)
            self.report.add_burst(ran, self.began, done, running.predicted)
            controller.charge(ran)
            if is_timed:
                self.planner.observe(ran)
            if ran.budget:
                self.planner.observe(done.drafted)
        ended = done.ended
        if has_enough is not None:
            enough, spoilt = controller.end(has_enough)
            executor.wipe(spoilt)
            ended = np.concatenate([ended, enough])
        self.began = clock.elapsed
        return ended
