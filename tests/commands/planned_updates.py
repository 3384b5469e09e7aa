"""Plans of small models, and what one update takes in them, by arithmetic or by a made-up compiler."""

from dataclasses import replace
from functools import cache

from pages import parsed, words_of

from pat_jax.commands import plan
from pat_jax.config.command_line import parse
from pat_jax.profiling.capacity.page import page
from pat_jax.profiling.capacity.plan_config import PlanConfig
from pat_jax.profiling.capacity.planned import planned
from pat_jax.profiling.capacity.report import PlanReport, Update
from pat_jax.profiling.capacity.update import PlannedUpdate
from pat_jax.profiling.cross_compile.compile import Compilation
from pat_jax.profiling.cross_compile.compiled import CompiledProgram
from pat_jax.profiling.simulate.draw import Draw
from pat_jax.profiling.simulate.response_lengths import ResponseLengths

ASKED = "--model tiny --target h100:8 --responses 64 --max_completion_length 3072 --rollouts 1 "
ASKED += "--speculation.source none"
Programs = tuple[CompiledProgram, ...]  # what a compiler might say of them


def config_of(options: str) -> PlanConfig:
    return parse([*ASKED.split(), *options.split()], PlanConfig, prog="plan", presets=None)


@cache
def made(options: str = "", programs: Programs = ()) -> PlanReport:
    question = plan.question_of(config_of(options), "the command")
    return planned(question, Compilation(programs, {"jaxlib": "0"}) if programs else None)


def updating(config: PlanConfig, programs: Programs = ()) -> PlannedUpdate:
    question = plan.question_of(config, "")
    return PlannedUpdate(question.build, programs, question.options.memory_options)


@cache
def alone(options: str = "", programs: Programs = (), model: str = "tiny") -> Update:
    """Of one rollout, without its replay."""
    config = replace(config_of(options), model=model)
    updates, rollout = updating(config, programs), config.rollout
    draw = Draw(rollout.num_responses, rollout.max_completion_length)
    workload = ResponseLengths.built_in("reasoning").draw(draw)
    return updates.of([workload], next(iter(updates.built.layouts)))


def seen_on_page(report: PlanReport) -> str:
    return words_of(parsed(page(report)))
