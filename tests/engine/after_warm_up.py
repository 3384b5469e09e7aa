"""Rollouts with drafts after the warm-up of their engine: nothing is compiled in them."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import jax
from compilations import counted_compilations

from pat_jax.engine.record.report import RolloutReport
from pat_jax.engine.sequences.responses import Completion, Request
from pat_jax.engine.warm_up.warm_up import Warmup
from pat_jax.planning.drafts import Acceptance
from pat_jax.planning.lengths.model import LengthModel
from pat_jax.planning.planner.planner import CostModelPlanner, Planner
from pat_jax.planning.planner.scripts import ScriptedPath, Step
from pat_jax.planning.types import Load, Plan, Split
from tests.lossless import Subject


@dataclass(frozen=True)
class NowAndThen(ScriptedPath):
    """Some bursts have drafts, and others none: a draft model has to catch up."""

    every: int = 3

    def decide(self, load: Load, current: Split, options=()) -> Plan:
        plan = super().decide(load, current)
        is_with = load.step // 8 % self.every > 0
        return replace(plan, num_draft_tokens=self.num_draft_tokens if is_with else 0)


def measured(one: Subject) -> CostModelPlanner:
    """After the warm-up. Steps with drafts take no time at all: drafts pay, whatever they are worth."""
    jax.clear_caches()  # what other tests have compiled on their way counts
    specs, latency = one.engine.specs, Warmup(one.engine).measure(one.weights)
    assert latency.num_draft_tokens == specs.drafts.num_draft_tokens
    costs = latency.on(specs.buckets.rows, specs.buckets.lengths)
    assert len(costs.verify_table) == len(latency.verify_table) > 0
    return CostModelPlanner(
        tuple(one.engine.layouts),
        replace(costs, verify_table=dict.fromkeys(costs.verify_table, 1e-9)),
        LengthModel.empty(specs.buckets.lengths[-1]),
        acceptance=Acceptance.unseen(is_generated=specs.drafts.is_generated),
        drafts=specs.drafts.limits,
    )


def check_in_all_layouts(
    one: Subject, requests: Sequence[Request], num_draft_tokens: int
) -> RolloutReport:
    """With drafts, without, and with both, in each layout; returns what a planner did that prices them."""
    splits = [*one.engine.layouts]
    steps = tuple(map(Step, (*splits[1:], splits[0]), (14, 11, 8, 5)))
    (_, priced), *scripted = run_compiling_nothing(
        one,
        requests,
        measured(one),
        ScriptedPath(splits[0], steps, num_draft_tokens=num_draft_tokens),
        ScriptedPath(splits[0], steps),
        NowAndThen(splits[0], steps, num_draft_tokens=num_draft_tokens, every=2),
    )
    bursts = [burst for _, report in scripted for burst in report.bursts]
    assert {(x.split, x.num_draft_tokens) for x in bursts} == {
        (x, n) for x in splits for n in (0, num_draft_tokens)
    }
    assert {burst.num_draft_tokens for burst in scripted[-1][1].bursts} == {0, num_draft_tokens}
    assert num_draft_tokens in {burst.num_draft_tokens for burst in priced.bursts}
    return priced


def run_compiling_nothing(
    one: Subject, requests: Sequence[Request], *planners: Planner
) -> list[tuple[list[Completion], RolloutReport]]:
    """A rollout by each planner, from the first layout on."""
    layout, found = next(iter(one.engine.layouts.values())), []
    for planner in planners:
        one.engine.set_weights(one.weights(layout), layout)
        with counted_compilations() as events:
            found.append(one.engine.rollout(requests, planner))
        assert events == []
        one.engine.release_weights()
    return found
