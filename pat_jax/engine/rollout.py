"""The loop of a rollout: from sequences that wait to sequences that are done, switching layouts on the way.

The controller says what comes next, the planner in which layout, an executor does it. Knows nothing about
text or rewards, nor whether it runs on devices or on a simulated clock.
"""

from collections.abc import Callable, Generator

import numpy as np

from pat_jax.engine.controller import Controller
from pat_jax.engine.executor import Executor
from pat_jax.engine.report import (
    RolloutReport,
    describe_balance,
    describe_stagger,
    describe_switch,
)
from pat_jax.engine.trace import Balanced, Switch
from pat_jax.planning.planner.planner import Planner
from pat_jax.planning.types import Balance, Plan, Ran, Relocated, way

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
        with clock("plan"):
            report.stagger = controller.stagger(planner)
        while controller.has_work:
            if running is None:
                plan, stays = _prepare(controller, executor, planner, report, tell), True
                began = clock.elapsed
                with clock("decode"):
                    running = controller.burst(plan)
                    executor.launch(running)
            following = None
            if controller.runs_ahead and stays:
                with clock("schedule"):
                    following = controller.burst_behind(running, plan)
                    if following is not None:
                        executor.launch(following)
            live = len(controller.table.live)
            with clock("decode"):
                output, is_timed = executor.collect()
                done = controller.collect(output)
                executor.wipe(done.spoilt)
            if done.steps:
                shape, seconds = running.shape, clock.elapsed - began
                ran = Ran(*shape[:3], live, done.held, done.steps, seconds, shape.budget)
                report.add_burst(ran, began, done.tokens, done.live_steps, done.drafted)
                controller.charge(ran)
                if running.predicted is not None:
                    report.add_drafts(ran, running.predicted, done.tokens / max(1, done.live_steps))
                # What is sent beside a burst slows it down.
                if is_timed and not controller.two_stages.is_between:
                    planner.observe(ran)
                if ran.budget:
                    planner.observe(done.drafted)
            ended = [done.ended]
            if has_enough is not None:
                enough, spoilt = controller.end(has_enough)
                executor.wipe(spoilt)
                ended.append(enough)
            running, began = following, clock.elapsed
            if running is not None and controller.has_work:
                with clock("plan"):
                    plan, balance = controller.decide(planner)
                stays = plan.split == controller.split and balance is None
            yield np.concatenate(ended)
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
    """All that comes before a burst while none runs: pages, prefill, the plan, a switch."""
    clock = executor.clock
    with clock("prefill"):
        work = controller.admit()
        report.add_prefill(work, executor.prefill(work))
    if not report.bursts and report.stagger is not None:
        if len(controller.table.waiting):
            tell(describe_stagger(report.stagger))
        else:  # pages that might have been too few were enough: all have begun
            report.stagger = None
    with clock("plan"):
        plan, balance = controller.decide(planner)
    if (first := controller.two_stages.dropped()) is not None:
        executor.send(())
        tell(f"balance: {first.balance.reason}; dropped, for by now it would not pay")
        planner.observe(Relocated(first.balance, first.seconds, came="none"))
    if not report.bursts:
        report.first_plan = plan.reason
        tell(f"first plan for {len(controller.table)} sequences: {plan.reason}")
    if plan.split != controller.split:
        with clock("switch"):
            switch = _switch(controller, executor, plan, report)
        report.switches.append(switch)
        tell(f"switch: {plan.reason}; took {switch.seconds:.3f} s")
        planner.observe(Relocated(plan, switch.seconds, switch.kv))
    elif balance is not None and balance.sending is not None:
        began = clock.elapsed
        with clock("balance"):
            executor.send(controller.two_stages.send(balance))
        controller.two_stages.note_sent(clock.elapsed - began)
    elif balance is not None:
        with clock("balance"):
            moved, all_came = _balance(controller, executor, balance)
        report.balanced.append(moved)
        tell(f"balance: {balance.reason}; took {moved.seconds:.3f} s")
        planner.observe(Relocated(balance, moved.seconds, came="all" if all_came else "some"))
    with clock("schedule"):
        controller.fit()
    return plan


def _switch(
    controller: Controller, executor: Executor, plan: Plan, report: RolloutReport
) -> Switch:
    """Weights, cache and rows to the plan's layout: the contribution, in four lines."""
    began = executor.clock.elapsed
    relocation = controller.relocate(plan)
    arrival = executor.relocate(relocation)
    work, waits = controller.arrive(relocation, arrival.new_page)
    report.add_prefill(work, executor.recompute(relocation, work, waits))
    seconds = executor.clock.elapsed - began
    live, recomputed = relocation.load.live, len(work.spans.sequence) + int(waits.sum())
    return Switch(
        step=report.decode_steps,
        live=live,
        source=str(relocation.source),
        target=str(relocation.target),
        kv=way(recomputed, live),
        bytes_moved=arrival.num_bytes,
        least_bytes=arrival.least_bytes,
        extra_bytes=arrival.extra_bytes,
        seconds=seconds,
        predicted_saving_s=plan.predicted_saving_s,
        predicted_cost_s=plan.predicted_cost_s,
        reason=plan.reason,
        recompute_below=plan.recompute_below,
        at_s=began,
        predicted_remaining_s=plan.predicted_remaining_s,
    )


def _balance(controller: Controller, executor: Executor, balance: Balance) -> tuple[Balanced, bool]:
    """Live sequences to other groups of their layout, and whether all have gone that were to go."""
    clock, table = executor.clock, controller.table
    began, fullest, step = clock.elapsed, table.fullest, table.num_steps
    relocation = controller.balance(balance)
    arrival = executor.relocate(relocation)
    seconds, old = clock.elapsed - began, relocation.load.group
    sequences, due = (int((group != old).sum()) for group in (relocation.group, balance.group))
    if (first := relocation.first) is not None:
        fullest, due, seconds = first.fullest, first.sequences, first.seconds + seconds
    moved = Balanced(
        step=step,
        layout=str(relocation.source),
        sequences=sequences,
        pages=len(relocation.moves.old_page),
        fullest=(fullest, table.fullest),
        seconds=seconds,
        predicted_saving_s=balance.predicted_saving_s,
        predicted_cost_s=balance.predicted_cost_s,
        bytes_moved=arrival.num_bytes or 0,
        least_bytes=arrival.least_bytes,
        pages_sent=int(relocation.is_sent.sum()),
        steps_between=step - first.step if first is not None else 0,
    )
    return moved, sequences == due
