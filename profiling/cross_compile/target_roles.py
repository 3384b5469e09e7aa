"""Builds the models of a run over devices that are not here.

Knows which models a plan names. Does not know which of their programs are compiled (`jobs.py`).
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache

from pat_jax.common.devices import Device
from pat_jax.config.programs import ProgramChoice
from pat_jax.engine.device.draft.drafter import Drafter
from pat_jax.layout.chain import least_tp
from pat_jax.layout.layout import Layout
from pat_jax.models.config import ModelConfig
from pat_jax.models.policy import Policy
from pat_jax.planning.types import Split
from pat_jax.training.build import micro_shapes, rollout_policy
from pat_jax.training.build_roles import build_roles, losses_of
from pat_jax.training.drafter_state import drafter_state
from pat_jax.training.role_model import RoleModel
from pat_jax.training.roles import Roles
from pat_jax.training.transfer import Receivers


@cache  # several builds of a plan have the same one
def policy_of(model: ModelConfig) -> Policy:
    return Policy.from_config(model)


def roles_of(
    run: ProgramChoice,
    others: Mapping[str, ModelConfig],
    devices: Sequence[Device],
    layouts: dict[Split, Layout],
    drafter: Drafter,
    model: ModelConfig,
) -> Roles:
    """Returns the models of a run whose policy is `model`, with `others` by the names of their
    roles, each in its layout with the least TP.

    Reward models are assumed to read the policy's micro-batches.
    """
    first = next(iter(layouts.values()))
    policy = Policy.from_config(model)
    models: list[RoleModel] = []
    for role in run.roles:
        if shape := others.get(role.name):
            layout = least_tp(devices, shape, run.fsdp_size)
            models.append(RoleModel(role, policy_of(shape), layout))
        else:
            models.append(RoleModel(role, policy, first))
    shapes = micro_shapes(run.micro_batches, first.split.dp, first.platform)
    rests = run.rest == "host"
    of_policy = models[0]
    scored = [each for each in models if each.role.devices == "reward"]
    scoring = {each.role.name: each.reader(shapes, rests=rests) for each in scored}
    kept = rollout_policy(policy, run.rollout.weights, of_policy.lora)
    roles = build_roles(
        [each for each in models if each.role.name not in scoring],
        losses_of(run.roles, run.algorithm, is_on_policy=run.updates_per_step == 1),
        shapes if run.trains else (),
        Receivers(of_policy.dtype, layouts, kept),
        rests=rests,
        others=[tree for reader in scoring.values() for tree in reader.resident],
        beside=drafter_state(drafter, first, model.embed_dim, of_policy.dtype, learns=run.trains),
    )
    by_name = {each.role.name: each for each in models}
    return replace(roles, readers={**roles.readers, **scoring}, models=by_name)
