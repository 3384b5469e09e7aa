"""The question that a plan answers, and the machine on which its rollouts are replayed."""

from dataclasses import dataclass

from pat_jax.config.programs import ProgramChoice
from pat_jax.engine.sizing.layout_choice import worth_planning
from pat_jax.planning.memory import MemoryModel
from pat_jax.planning.types import Split
from pat_jax.profiling.capacity.costs import SourcedLatency
from pat_jax.profiling.capacity.layout_parts import WHILE_DECODING
from pat_jax.profiling.capacity.plan_config import PlanConfig
from pat_jax.profiling.cross_compile.compile import Compilation
from pat_jax.profiling.cross_compile.target_build import TargetBuild
from pat_jax.profiling.simulate.comparison import Series
from pat_jax.profiling.simulate.draft_sources import DraftSource
from pat_jax.profiling.simulate.machine import Machine
from pat_jax.profiling.simulate.response_lengths import ResponseLengths


@dataclass(frozen=True)
class Question:
    """The question that a plan answers: a model, a target and the rollouts, all checked."""

    command: str
    name: str  # of the model
    build: TargetBuild  # over stand-ins for devices
    series: Series
    lengths: ResponseLengths
    costs: SourcedLatency
    options: PlanConfig  # settled: no option is auto
    source: DraftSource | None = None  # where drafts are from; None: there are no drafts

    @property
    def run(self) -> ProgramChoice:
        return self.build.order.run


def machine_of(
    question: Question, used: tuple[Split, ...], memory: MemoryModel | None = None
) -> Machine:
    """Returns the machine on which rollouts are replayed in the `used` layouts. `memory` is that of
    all layouts, by default that of the question's build."""
    costs = question.costs
    return Machine.of(
        costs.latency,
        used,
        question.run.rollout,
        capacity=question.series.draw.sequences,
        memory=memory or question.build.memory,
        runs_ahead=True,
        drafts=costs.drafts,
        acceptance=question.source.acceptance if question.source else None,
    )


def refused_layouts(question: Question, compilation: Compilation | None) -> dict[Split, str]:
    """Returns the layouts that are not used, each with the reason."""
    build = question.build
    latency = question.costs.latency
    kept, dropped = worth_planning(question.run.rollout, build.layouts, build.alone, latency)
    reasons = {split: f"layout {split}: " for split in build.layouts if split not in kept}
    refused = {
        split: next(reason.removeprefix(start) for reason in dropped if reason.startswith(start))
        for split, start in reasons.items()
    }
    known = {split for split, _, _ in latency.decode_table}
    refused |= {split: "no times of it are known" for split in kept if split not in known}
    for program in compilation.failed if compilation else ():
        if program.name in WHILE_DECODING:
            named = program.name + " with drafts" * (program.num_draft_tokens > 0)
            refused.setdefault(program.split, f"{named} does not compile: {program.error}")
    return refused
