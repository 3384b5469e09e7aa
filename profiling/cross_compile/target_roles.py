"""Builds the models of a run over devices that are not here.

Knows which models a plan names. Does not know which of their programs are compiled (`jobs.py`).
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from functools import cache

from pat_jax.common.devices import Device
from pat_jax.config.by_model import settled_dtype
from pat_jax.config.role_table import POLICY, REFERENCE, Role, reward_role, role_table
from pat_jax.config.run import RunConfig
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


def _table(config: RunConfig, others: Collection[str], platform: str) -> list[Role]:
    """Returns the rows of the policy, its reference and the `others`, named ones of a plan."""
    known = {role.name: role for role in role_table(config, platform)}
    dtype = settled_dtype("auto", platform, is_checkpoint=True)
    own = [known[name] for name in (POLICY, REFERENCE) if name in known]
    return own + [known.get(name) or reward_role(name, dtype) for name in others]


def roles_of(
    config: RunConfig,
    others: Mapping[str, ModelConfig],
    devices: Sequence[Device],
    layouts: dict[Split, Layout],
    drafter: Drafter,
    model: ModelConfig,
) -> Roles:
    """Returns the models of a run whose policy is `model`, with `others` by the names of their
    roles, each in its layout with the least TP.

    Reward models, too, read the policy's micro-batches here.
    """
    first, policy = next(iter(layouts.values())), Policy.from_config(model)
    table = _table(config, others, first.platform)
    models: list[RoleModel] = []
    for role in table:
        layout, own = first, policy
        if shape := others.get(role.name):
            layout, own = least_tp(devices, shape, config.fsdp_size), policy_of(shape)
        models.append(RoleModel(role, own, layout))
    shapes = micro_shapes(config.micro_batches, first.split.dp, first.platform)
    rests, of_policy = config.roles.rest == "host", models[0]
    scoring = {
        each.role.name: each.reader(shapes, rests=rests)
        for each in models
        if each.role.devices == "reward"
    }
    kept = rollout_policy(policy, config.rollout.weights, of_policy.lora)
    roles = build_roles(
        [each for each in models if each.role.name not in scoring],
        losses_of(table, config.algorithm, is_on_policy=config.updates_per_step == 1),
        shapes if config.learns else (),
        Receivers(of_policy.dtype, layouts, kept),
        rests=rests,
        others=[tree for reader in scoring.values() for tree in reader.resident],
        beside=drafter_state(drafter, first, model.embed_dim, of_policy.dtype, learns=config.train),
    )
    every = {each.role.name: each for each in models}
    return replace(roles, readers={**roles.readers, **scoring}, models=every)
