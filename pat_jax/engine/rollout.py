"""The loop of a rollout: generates all sequences of a table, and moves them on the way.

The planner decides, a move carries the decision out, a burst runs, and the report records both.
Knows nothing about text or rewards, nor whether it runs on devices or on a simulated clock.
"""

from collections.abc import Callable, Generator
from dataclasses import dataclass, replace

import numpy as np

from pat_jax.engine.executor import Burst, Executor
from pat_jax.engine.record.report import RolloutReport
from pat_jax.engine.scheduler import Scheduler
from pat_jax.planning.planner.planner import Planner
from pat_jax.planning.types import BurstResult, Moved, Plan, way

Notify = Callable[[str], None]
HasEnough = Callable[[int], bool]


def rollout(
    scheduler: Scheduler,
    executor: Executor,
    planner: Planner,
    report: RolloutReport,
    should_stop: HasEnough | None = None,
    notify: Notify = lambda text: None,
) -> Generator[np.ndarray, None, None]:
    """Yields after each burst the sequences that have ended, int[ended].

    Args:
      report: filled during the loop; complete after the last burst.
      should_stop: called after each burst for every running sequence; True ends the sequence.
      notify: called with one sentence per plan and switch.
    """
    loop = _Loop(scheduler, executor, planner, report, notify)
    in_flight = None
    try:
        while scheduler.table.has_work:
            if in_flight is None:
                loop.admit()
            plan = loop.decide()
            if in_flight is None:
                if plan.moves_from(scheduler.split):
                    plan = loop.move(plan)
                in_flight = loop.launch(plan)
            following = loop.launch_behind(in_flight, plan)
            yield loop.collect(in_flight, should_stop)
            in_flight = following
    finally:  # also if the caller closes the generator early
        executor.release()
    report.finish(scheduler, executor.clock)
    for sentence in report.words:
        notify(sentence)


@dataclass
class _Loop:
    """The stages of one rollout; the executor's clock times each."""

    scheduler: Scheduler
    executor: Executor
    planner: Planner
    report: RolloutReport
    notify: Notify
    began: float = 0.0  # seconds on the clock at the start of the running burst

    def admit(self) -> None:
        """Gives pages and rows for the next steps, and prefills newly admitted sequences."""
        with self.executor.clock("prefill"):
            work = self.scheduler.admit()
            self.report.add_prefill(work, self.executor.prefill(work))

    def decide(self) -> Plan:
        with self.executor.clock("plan"):
            plan = self.scheduler.decide(self.planner)
        if not self.report.first_plan and plan.reason:
            self.report.first_plan = plan.reason
            self.notify(f"first plan for {len(self.scheduler.table)} sequences: {plan.reason}")
        return plan

    def move(self, plan: Plan) -> Plan:
        """Moves weights, cache and rows to the plan's layout or replicas: the project's core.

        Returns what is left of the plan: how to decode after the move.
        """
        scheduler = self.scheduler
        executor = self.executor
        report = self.report
        kind = "switch" if plan.replica is None else "balance"
        began = executor.clock.elapsed
        fullest = scheduler.table.fullest
        with executor.clock(kind):
            relocation = scheduler.leave(plan)
            arrival = executor.relocate(relocation)
            work, waits = scheduler.arrive(relocation, arrival.new_page)
            report.add_prefill(work, executor.recompute(relocation, work, waits))
        seconds = executor.clock.elapsed - began
        carry = way(len(work.spans.sequence) + int(waits.sum()), relocation.load.running)
        levels = fullest, scheduler.table.fullest
        report.add_move(plan, relocation, arrival, carry, levels, began, seconds)
        self.notify(f"{kind}: {plan.reason}; took {seconds:.3f} s")
        is_whole = plan.replica is None or bool((relocation.replica == plan.replica).all())
        self.planner.observe(Moved(plan, seconds, carry, is_whole))
        return replace(plan, replica=None)

    def launch(self, plan: Plan) -> Burst:
        """Launches the next burst while none is running."""
        with self.executor.clock("schedule"):
            self.scheduler.fit()
        self.began = self.executor.clock.elapsed
        with self.executor.clock("decode"):
            burst = self.scheduler.burst(plan)
            self.executor.launch(burst)
        return burst

    def launch_behind(self, in_flight: Burst, plan: Plan) -> Burst | None:
        """Launches the burst after the running one before its results are known, if possible."""
        scheduler = self.scheduler
        if not scheduler.runs_ahead or plan.moves_from(scheduler.split):
            return None
        with self.executor.clock("schedule"):
            following = scheduler.burst_behind(in_flight, plan)
            if following is not None:
                self.executor.launch(following)
        return following

    def collect(self, in_flight: Burst, should_stop: HasEnough | None) -> np.ndarray:
        """Collects a burst's results; returns the sequences that ended, int[ended]."""
        scheduler = self.scheduler
        executor = self.executor
        clock = executor.clock
        running = len(scheduler.table.running)
        length = scheduler.bursts.length(in_flight.shape)
        with clock("decode"):
            output, is_timed = executor.collect()
            done = scheduler.collect(output)
            executor.scrub(done.poisoned)
        if done.steps:
            split, rows, _, num_draft_tokens = in_flight.shape
            seconds = clock.elapsed - self.began
            ran = BurstResult(
                split, rows, length, running, done.held, done.steps, seconds, num_draft_tokens
            )
            self.report.add_burst(ran, self.began, done, in_flight.predicted)
            scheduler.bursts.charge(scheduler.split, ran)
            if is_timed:
                self.planner.observe(ran)
            if ran.num_draft_tokens:
                self.planner.observe(done.drafted)
        ended = done.ended
        if should_stop is not None:
            enough, poisoned = scheduler.end(should_stop)
            executor.scrub(poisoned)
            ended = np.concatenate([ended, enough])
        self.began = clock.elapsed
        return ended
