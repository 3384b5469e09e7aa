"""`--show_switch`: after a run, shows a forced switch, and a plan for other devices."""

import logging
import shlex
from contextlib import suppress
from dataclasses import replace

from pat_jax.commands.plan import question_of
from pat_jax.common.hosts.together import process_group
from pat_jax.config.command_line import parse
from pat_jax.engine.record.plot import draw_rollouts
from pat_jax.profiling.capacity.plan_config import PlanConfig
from pat_jax.profiling.capacity.planned import planned
from pat_jax.run.files.folder import PAGE_FILE
from pat_jax.run.files.shown_switch import SWITCH_PICTURE, ComputedPlan, ShownSwitch, write_switch
from pat_jax.run.opened import Run
from pat_jax.run.process.stop_signals import Stopped
from pat_jax.run.results.same_rollout import same_rollout

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
