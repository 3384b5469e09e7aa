"""Chooses before a run is built: its placement, for `train --placement auto`, and expert_width.

The run is priced as `plan --placement auto` prices it, on the devices that are here. With several
processes the first one decides, among placements that cut each process alike.
"""

import logging
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from pat_jax.commands.plan import question_of
from pat_jax.common.chips import chips
from pat_jax.common.devices import Device
from pat_jax.common.hosts.together import ProcessGroup, process_group
from pat_jax.common.text_table import text_table
from pat_jax.config.critic import critic_source
from pat_jax.config.placement import PlacementConfig
from pat_jax.config.roles import RolesConfig
from pat_jax.config.rollout import EngineSizes
from pat_jax.config.run import RunConfig
from pat_jax.config.shared import UpdateOptions
from pat_jax.config.teacher import TeacherConfig
from pat_jax.planning.placement import ROLES, PlacedRole, in_ranges
from pat_jax.profiling.capacity.placing import Placing
from pat_jax.profiling.capacity.plan_config import PlanConfig
from pat_jax.profiling.capacity.plan_roles import (
    PlannedAdapters,
    PlannedAlgorithm,
    PlannedCritic,
    PlannedTeacher,
)
from pat_jax.profiling.capacity.tables import placements
from pat_jax.profiling.placement.candidates import Candidate
from pat_jax.profiling.predict.expert_width import settled_width
from pat_jax.profiling.predict.targets import Target
from pat_jax.run.setup import model_config, settled_options
from pat_jax.run.start.chosen_placement import ChosenPlacement

log = logging.getLogger(__name__)
Run = TypeVar("Run", bound=RunConfig)


def chosen_placement(
    config: RunConfig, devices: Sequence[Device], us: ProcessGroup | None = None
) -> ChosenPlacement:
    """Returns the run with a placement in place of `auto`, the same in every process.

    Args:
      devices: of all processes.
      us: the processes; None: those of this run.

    Raises:
      UserError: the model or an option cannot work.
    """
    flat = replace(config, placement=replace(config.placement, name="flatten"))
    if why := _nothing_to_choose(config, devices):
        return ChosenPlacement(flat, f"flatten: {why}.")
    target = Target.of(devices)
    if target is None:
        kinds = f"{len(devices)} x {devices[0].device_kind}"
        known = ", ".join(chips())
        return ChosenPlacement(
            flat, f"flatten: iterations are predicted for {known}, not for {kinds}."
        )
    together = us or process_group()
    found = together.agree("placement", lambda: _priced(flat, devices, target))
    placement, roles = found.config.placement, found.config.roles  # the rest may be the first's own
    return replace(found, config=replace(config, placement=placement, roles=roles))


def with_width(config: Run, devices: Sequence[Device]) -> Run:
    """Returns the run with a number in place of `--rollout.expert_width auto`: 1 on unknown
    devices, or if its rollouts have devices of their own."""
    rollout, model = config.rollout, model_config(config, devices)
    if model.experts is None or config.placement != PlacementConfig():
        return config
    if (target := Target.of(devices)) is None:
        return config
    responses = rollout.prompts_per_step * rollout.num_generations
    width = settled_width(target, model, rollout, config, responses)
    log.info("--rollout.expert_width is %d", width)
    return replace(config, rollout=replace(rollout, expert_width=width))


def _priced(flat: RunConfig, devices: Sequence[Device], target: Target) -> ChosenPlacement:
    """Returns the choice for a run whose placement is `flat`."""
    run, _ = settled_options(flat, model_config(flat, devices), devices)
    question = question_of(_asked(run, target), "")
    placing = Placing(question, run, cuts=len(_of_processes(devices)))
    found = placing.placements()
    place = _options(found.chosen.candidate, placing.roles)
    table, schedule = placements(found), found.chosen.schedule
    predicted_s = schedule.stage_s if schedule else {}
    roles = flat.roles if place == PlacementConfig() else RolesConfig(found.chosen.rest)
    return ChosenPlacement(
        replace(flat, placement=place, roles=roles),
        found.reason,
        text_table(table.header, table.rows),
        predicted_s,
    )


def _nothing_to_choose(config: RunConfig, devices: Sequence[Device]) -> str:
    """Returns why there is no choice, in words; empty if there is one."""
    if len(devices) == 1:
        return "there is one device"
    if not config.train:
        return "nothing is trained"
    numbers = _of_processes(devices)
    if len(numbers) == 1:
        return ""
    if devices[0].platform == "tpu":
        return f"a TPU slice is priced for one process, and there are {len(numbers)}"
    if len({*numbers}) > 1:
        return f"the {len(numbers)} processes have different numbers of devices"
    if numbers[0] == 1:
        return f"each of the {len(numbers)} processes has one device, for all models"
    return ""


def _of_processes(devices: Sequence[Device]) -> list[int]:
    """The number of devices of each process."""
    return list(Counter(device.process_index for device in devices).values())


def _options(chosen: Candidate, roles: Collection[PlacedRole]) -> PlacementConfig:
    """Returns a candidate as options of a run that has `roles`."""
    if chosen.placement.is_flat:
        return PlacementConfig(tail=chosen.tail)
    if name := chosen.known_name(roles):
        return PlacementConfig(name, chosen.overlap)
    places = chosen.placement.places
    given: dict[str, Any] = {role: in_ranges(places[role]) for role in ROLES if role in roles}
    return PlacementConfig("flatten", chosen.overlap, **given)


def _asked(run: RunConfig, target: Target) -> PlanConfig:
    """Returns what `plan` would be asked about this run, whose `auto` options are settled."""
    rollout, algorithm = run.rollout, run.algorithm
    rollout = replace(rollout, expert_width=rollout.expert_width or 1)  # of any part of devices
    prompts = rollout.prompts_per_step
    models = tuple(x for x in run.reward if x.startswith("model:"))
    return PlanConfig(
        model=run.model,
        target=str(target),
        responses=prompts * rollout.num_generations,
        num_generations=rollout.num_generations,
        max_prompt_length=rollout.max_prompt_length,
        max_completion_length=rollout.max_completion_length,
        prompt_tokens=min(PlanConfig.prompt_tokens, rollout.max_prompt_length),
        lora_rank=run.lora.rank,
        beta=algorithm.beta,
        algorithm=PlannedAlgorithm(
            algorithm.name, "true" if algorithm.whiten_advantages else "false"
        ),
        critic=PlannedCritic(
            critic_source(run.critic.model, run.reward, "") if algorithm.has_critic else "",
            PlannedAdapters(run.critic.lora.rank if algorithm.has_critic else 0),
        ),
        reward=models,
        teacher=PlannedTeacher(**run.teacher.shared(TeacherConfig)),
        roles=run.roles,
        mini_batch_size=algorithm.mini_batch_size,
        tokens_per_micro_batch=algorithm.tokens_per_micro_batch,
        weights=rollout.weights,
        compute_dtype="bfloat16" if run.compute_dtype == "bfloat16" else "float32",
        compile=False,
        seed=run.seed,
        speculation=run.speculation,
        **rollout.shared(EngineSizes),
        **run.shared(UpdateOptions),
    )
