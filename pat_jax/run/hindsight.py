"""What a planned path has cost over the best one, once it is known how long the responses were."""

from collections.abc import Sequence
from functools import partial

import numpy as np

from pat_jax.common.hosts.together import company
from pat_jax.engine.report import RolloutReport
from pat_jax.planning.planner.planner import CostModelPlanner
from pat_jax.profiling.measure.regret import planned_regret
from pat_jax.rl.types import RolloutGroup
from pat_jax.run.generation import Generator


def hindsight(
    generator: Generator, groups: Sequence[RolloutGroup], report: RolloutReport
) -> dict[str, float]:
    """The regret of the planned path, by the planner's own prices and the lengths that came."""
    planner = generator.planner
    if not isinstance(planner, CostModelPlanner):
        return {}
    rollouts = [one for group in groups for one in group.rollouts]
    sequences = [(len(x.prompt.tokens), len(x.tokens), x.prompt.id) for x in rollouts]
    regret = partial(
        planned_regret,
        planner,
        generator.config,
        np.array(sequences).T,
        report.trace,
        capacity=generator.engine.capacity,
        expected=report.expected,
    )
    return {"rollout/regret": company().agree("regret", regret)}
