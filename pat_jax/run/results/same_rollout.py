"""Makes the next rollout of an ended run twice: as planned, and with a forced switch.

The run learns nothing from it: no update, no metric, no length. Both rollouts use the same random
numbers, which belong to the requests.
"""

from collections.abc import Sequence

from pat_jax.engine.record.report import RolloutReport
from pat_jax.engine.sequences.responses import Completion, Request
from pat_jax.planning.planner.planner import Planner
from pat_jax.planning.planner.scripts import ScriptedPath, Step
from pat_jax.planning.types import Split
from pat_jax.run.files.shown_switch import ShownSwitch
from pat_jax.run.generation import full_load, sampled, training_requests
from pat_jax.run.opened import Run

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
    narrow, wide = two_layouts(run)

    def switched(running: int) -> tuple[list[Completion], RolloutReport]:
        planner = ScriptedPath(narrow, (Step(wide, running),))
        found = _rollout(run, planner, requests)
        # The first run of a program takes longer.
        return _rollout(run, planner, requests) if found[1].compile_s else found

    found = switched(len(requests) // TAIL)
    return found if found[1].switches else switched(len(requests))


def two_layouts(run: Run) -> tuple[Split, Split]:
    """Returns the layouts with the least and the most TP."""
    splits = list(run.setup.engine.layouts)
    return splits[0], splits[-1]


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
