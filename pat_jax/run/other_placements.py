"""With `--placement auto`: predicts the seconds of an iteration with other placements.

Knows the placements that the run may have. `planning/placement_seconds.py` has the equations.
"""

import logging
from collections.abc import Callable, Mapping
from dataclasses import replace

from pat_jax.common.errors import UserError
from pat_jax.common.hosts.together import process_group
from pat_jax.planning.placement import PlacementName
from pat_jax.planning.placement_seconds import described, placement_seconds
from pat_jax.planning.planner.planner import CostModelPlanner, Planner
from pat_jax.planning.stage_names import ROLLOUT
from pat_jax.run.generation import full_load
from pat_jax.run.roles.placed_layouts import PlacedLayouts
from pat_jax.run.roles.places import Places
from pat_jax.run.start.setup import Setup

OTHERS: tuple[PlacementName, ...] = ("interleave", "separate", "split")
log = logging.getLogger(__name__)


def compared(
    setup: Setup, planner: Planner, stages: Mapping[str, float], notify: Callable[[str], None]
) -> dict[str, float]:
    """Prints and logs an iteration's predicted seconds with each placement. Returns metrics.

    Args:
      stages: measured seconds of each stage of an iteration.
    """
    config = setup.config
    names = allowed_placements(setup)
    growth = rollout_growth(planner, setup)
    if growth is None and "separate" in names:
        names.remove("separate")
    waits = config.deterministic or config.teacher.top_k > 0
    found = placement_seconds(
        stages,
        (growth or 1.0) * stages.get(ROLLOUT, 0.0),
        names,
        reads_as_they_end=process_group().is_alone and not waits,
    )
    notify(line := f"placement: {described(found)}")
    log.info("%s", line)
    return {f"placement/{name}": seconds for name, seconds in found.items()}


def rollout_growth(planner: Planner, setup: Setup) -> float | None:
    """Returns how many times as long a rollout takes on half of the devices, as the planner
    predicts, or None if it has no prediction.

    Replicas are independent, so half of them take as long as all would with twice the sequences.
    """
    if not isinstance(planner, CostModelPlanner):
        return None
    rollout = setup.config.rollout
    count = rollout.prompts_per_step * rollout.num_generations
    whole_s, half_s = (planner.rollout_s(full_load(rollout, n)) for n in (count, 2 * count))
    return half_s / whole_s


def allowed_placements(setup: Setup) -> list[PlacementName]:
    """Returns the placements except `flatten` that the run's models, devices and options allow."""
    config = setup.config
    found = list[PlacementName]()
    for name in OTHERS:
        try:
            asked = replace(config, placement=replace(config.placement, name=name))
            places = Places.of(asked.placement, setup.devices, asked.on_one_base)
            placed = PlacedLayouts.of(
                setup.policy.config,
                places,
                config.rollout,
                config.layout_choice,
                config.fsdp_size,
            )
        except UserError:
            continue
        # `interleave` moves reward models and frozen roles; without these it equals `flatten`.
        moves = name != "interleave" or setup.reward_models or setup.roles.readers
        sends_drafts = placed.carriers and setup.engine.specs.drafts.is_generated
        if moves and not places.placement.is_flat and not sends_drafts:
            found.append(name)
    return found
