"""The loop of a rollout: from sequences that wait to sequences that are done, moving on the way.

The planner decides, a move carries its decision out, a burst runs, the report has what came of both.
Knows nothing about text or rewards, nor whether it runs on devices or on a simulated clock.
"""

from collections.abc import Callable, Generator

import numpy as np

from pat_jax.engine.controller import Burst, Controller
from pat_jax.engine.executor import Executor
from pat_jax.engine.record.report import RolloutReport, describe_balance, describe_switch
from pat_jax.planning.planner.planner import Planner
from pat_jax.planning.types import Moved, Plan, Ran, way

Tell = Callable[[str], None]


def silent(text: str) -> None:
    """For replays."""
    del text


def rollout(
    controller: Controller,
    executor: Executor,
    planner: Planner,
    report: RolloutReport,
    has_enough: Callable[[int], bool] | None = None,
    tell: Tell = silent,
) -> Generator[np.ndarray, None, None]:
    """Yields after each burst the sequences that have ended, int[ended].

    Args:
      report: filled in on the way; whole when the last sequences have been taken.
      has_enough: asked after each burst of every live sequence; where it says True that one ends.
      tell: hears of plans and switches, a sentence each.
    """
    clock, running = executor.clock, None
    try:
        while controller.has_work:
            if running is None:
                plan, stays = _prepare(controller, executor, planner, report, tell), True
                began = clock.elapsed
                with clock("decode"):
                    running = controller.burst(plan)
                    executor.launch(running)
            else:  # it was dispatched behind the one before
                with clock("plan"):
                    plan = controller.decide(planner)
                stays = not plan.moves_from(controller.split)
            following = _launch_behind(controller, executor, running, plan) if stays else None
            ended = _collect(controller, executor, planner, report, running, began)
            if has_enough is not None:
                enough, spoilt = controller.end(has_enough)
                executor.wipe(spoilt)
                ended = np.concatenate([ended, enough])
            running, began = following, clock.elapsed
            yield ended
    finally:  # also where nobody takes the rest
        executor.release()
    report.finish(controller, clock)
    for switch in report.switches:
        tell(describe_switch(switch, report.total_s))
    if report.balanced:
        tell(describe_balance(report))
    if report.drafts.steps:
        tell(report.drafts.words)


def _prepare(
    controller: Controller,
    executor: Executor,
    planner: Planner,
    report: RolloutReport,
    tell: Tell,
) -> Plan:
    """All that comes before a burst while none runs: pages, prefill, the plan, its move."""
    clock = executor.clock
    with clock("prefill"):
        work = controller.admit()
        report.add_prefill(work, executor.prefill(work))
    with clock("plan"):
        plan = controller.decide(planner)
    if not report.bursts:
        report.first_plan = plan.reason
        tell(f"first plan for {len(controller.table)} sequences: {plan.reason}")
    if plan.moves_from(controller.split):
        kind = "switch" if plan.group is None else "balance"
        with clock(kind):
            moved = _move(controller, executor, plan, report)
        tell(f"{kind}: {plan.reason}; took {moved.seconds:.3f} s")
        planner.observe(moved)
    with clock("schedule"):
        controller.fit()
    return plan


def _move(controller: Controller, executor: Executor, plan: Plan, report: RolloutReport) -> Moved:
    """Weights, cache and rows to the plan's layout or groups: the contribution, in four lines."""
    began, fullest = executor.clock.elapsed, controller.table.fullest
    relocation = controller.leave(plan)
    arrival = executor.relocate(relocation)
    work, waits = controller.arrive(relocation, arrival.new_page)
    report.add_prefill(work, executor.recompute(relocation, work, waits))
    seconds, load = executor.clock.elapsed - began, relocation.load
    if plan.group is not None:
        after = controller.table.fullest
        report.add_balance(plan, relocation, arrival, seconds, (fullest, after))
        return Moved(plan, seconds, is_whole=bool((relocation.group == plan.group).all()))
    carry = way(len(work.spans.sequence) + int(waits.sum()), load.live)
    report.add_switch(plan, relocation, arrival, seconds, carry, began)
    return Moved(plan, seconds, carry)


def _launch_behind(
    controller: Controller, executor: Executor, running: Burst, plan: Plan
) -> Burst | None:
    if not controller.runs_ahead:
        return None
    with executor.clock("schedule"):
        following = controller.burst_behind(running, plan)
        if following is not None:
            executor.launch(following)
    return following


def _collect(
    controller: Controller,
    executor: Executor,
    planner: Planner,
    report: RolloutReport,
    running: Burst,
    began: float,
) -> np.ndarray:
    """Takes over what a burst did; returns the sequences that it ended, int[ended]."""
    clock, live = executor.clock, len(controller.table.live)
    with clock("decode"):
        output, is_timed = executor.collect()
        done = controller.collect(output)
        executor.wipe(done.spoilt)
    if done.steps:
        shape, seconds = running.shape, clock.elapsed - began
        ran = Ran(*shape[:3], live, done.held, done.steps, seconds, shape.budget)
        report.add_burst(ran, began, done, running.predicted)
        controller.charge(ran)
        if is_timed:
            planner.observe(ran)
        if ran.budget:
            planner.observe(done.drafted)
    return done.ended
