"""`--show_switch`: after a run, shows a forced switch, and a plan for other devices."""

import logging
import shlex
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace

from pat_jax.commands.plan import question_of
from pat_jax.common.hosts.together import process_group
from pat_jax.config.command_line import parse
from pat_jax.engine.record.plot import draw_rollouts
from pat_jax.engine.record.report import RolloutReport
from pat_jax.engine.sequences.responses import Completion, Request
from pat_jax.planning.planner.planner import Planner
from pat_jax.planning.planner.scripts import ScriptedPath, Step
from pat_jax.profiling.capacity.plan_config import PlanConfig
from pat_jax.profiling.capacity.planned import planned
from pat_jax.run.files.folder import PAGE_FILE
from pat_jax.run.files.shown_switch import SWITCH_PICTURE, ComputedPlan, ShownSwitch, write_switch
from pat_jax.run.generation import full_load, sampled, training_requests
from pat_jax.run.opened import Run
from pat_jax.run.process.stop_signals import Stopped

PLAN = (
    "python -m pat_jax.plan --model llama-3.1-8b --target h100:8 --responses 512 --max_completion_length 24576 "
    "--rollouts 1 --train false --compile false --speculation.source none"
)
NEXT = "python -m pat_jax.train --preset qwen2.5-0.5b"

log = logging.getLogger(__name__)


def show_switch(run: Run) -> None:
    """Makes a rollout twice, as planned and with a forced switch, and saves and prints both.
    Changes nothing that the run has learned or saved. A failure is printed in one line."""
    is_new = run.config.steps > run.first
    if len(run.setup.layouts) == 1 or not (process_group().is_alone and is_new):
        return
    try:
        shown = replace(same_rollout(run), computed=computed_plan())
        _keep(run, shown)
    except Stopped as stop:
        _tell_nothing(f"stopped by {stop.name}")
        raise
    except Exception as error:  # no failure here can matter: the run is complete
        first, *_ = f"{error}".splitlines() or [""]
        _tell_nothing(f"{type(error).__name__}: {first}")
        return
    _tell(run, shown)


def _tell_nothing(why: str) -> None:
    told = f"--show_switch shows nothing ({why}); the run is complete"
    log.warning("%s", told)
    with suppress(OSError):  # the reader of the output may have gone
        print(told, flush=True)


def computed_plan(command: str = PLAN) -> ComputedPlan:
    """Computes the plan for an 8B policy on eight H100s, from the shipped tables."""
    argv = shlex.split(command)[3:]
    config = parse(argv, PlanConfig, prog="python -m pat_jax.plan", presets=None)
    report = planned(question_of(config, command), None)
    found = report.comparison
    return ComputedPlan(
        command=command,
        model=config.model,
        target=config.target,
        responses=config.responses,
        max_tokens=config.max_completion_length,
        reliance=report.steps.reliance,
        planned_s=found.adaptive.mean_s,
        static=tuple((system.name, system.mean_s) for system in found.static),
        trace=found.traces[0],
    )


def _keep(run: Run, shown: ShownSwitch) -> None:
    write_switch(run.files.folder, shown)
    pictures = {"as planned": shown.planned, "with a forced switch": shown.forced}
    draw_rollouts(pictures).save(run.files.folder / SWITCH_PICTURE)
    run.files.page.write_now()


def _tell(run: Run, shown: ShownSwitch) -> None:
    assert shown.computed is not None
    lines = [*shown.lines(), f"computed, nothing ran: {shown.computed.words}", f"  {PLAN}"]
    lines.append(f"next: look at {run.files.folder / PAGE_FILE}, then train a real model: {NEXT}")
    for line in lines:
        print(line)
        log.info("%s", line.strip())


TAIL = 4  # the switch comes when a quarter of the responses is unfinished


def same_rollout(run: Run) -> ShownSwitch:
    """Makes the rollout twice, and compares the tokens. `run` must have at least two layouts, and
    its engine the weights of the last policy. Raises UserError if a response could not be
    sampled."""
    rollout = run.config.rollout
    totals = run.collector.totals
    prompts, _ = run.setup.task.train.draw(totals.cursor, rollout.prompts_per_step)
    requests = training_requests(rollout, prompts, run.config.seed, totals.batches)
    done, report = _rollout(run, run.generator.planner, requests)
    again, forced = _forced(run, requests)
    return ShownSwitch(
        step=run.config.steps + 1,
        is_cpu=run.setup.devices[0].platform == "cpu",
        reason=report.first_plan,
        planned=report.trace,
        forced=forced.trace,
        responses=len(requests),
        tokens=sum(max(len(a.tokens), len(b.tokens)) for a, b in zip(done, again, strict=True)),
        same_tokens=sum(map(same_tokens, done, again)),
    )


def _forced(run: Run, requests: Sequence[Request]) -> tuple[list[Completion], RolloutReport]:
    """Makes the rollout with one switch: in the tail, or at once if all responses end together."""
    narrow, *_, wide = run.setup.engine.layouts

    def switched(running: int) -> tuple[list[Completion], RolloutReport]:
        planner = ScriptedPath(narrow, (Step(wide, running),))
        found = _rollout(run, planner, requests)
        # The first run of a program takes longer.
        return _rollout(run, planner, requests) if found[1].compile_s else found

    found = switched(len(requests) // TAIL)
    return found if found[1].switches else switched(len(requests))


def _rollout(
    run: Run, planner: Planner, requests: Sequence[Request]
) -> tuple[list[Completion], RolloutReport]:
    engine = run.setup.engine
    report = RolloutReport()
    first = engine.layouts[planner.start(full_load(run.config.rollout, engine.capacity))]
    if first is not engine.layout:
        engine.weights.reshard(first)
    stream = engine.stream(requests, planner, report)
    done = dict(sampled(stream, len(requests), "see the run's last steps"))
    return [done[i] for i in range(len(requests))], report


def same_tokens(one: Completion, other: Completion) -> int:
    """Returns how many tokens are equal before the first that differs."""
    pairs = zip(one.tokens.tolist(), other.tokens.tolist(), strict=False)
    differs = (i for i, (a, b) in enumerate(pairs) if a != b)
    return next(differs, min(len(one.tokens), len(other.tokens)))
