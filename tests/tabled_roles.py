"""The handles of a run's models by its options, over devices and models of a test."""

from collections.abc import Sequence
from dataclasses import replace

from pat_jax.config.role_table import CRITIC, REFERENCE, role_table
from pat_jax.config.run import RunConfig
from pat_jax.layout.layout import Layout
from pat_jax.models.config import ModelConfig
from pat_jax.models.policy import Policy
from pat_jax.rl.batches.packing import Shape
from pat_jax.training.build_roles import build_roles, losses_of
from pat_jax.training.role_model import RoleModel
from pat_jax.training.roles import Roles
from pat_jax.training.transfer import Receivers


def tabled_roles(
    config: RunConfig,
    policy: Policy,
    layout: Layout,
    shapes: Sequence[Shape],
    *,
    critic: ModelConfig | None = None,
    reference: Layout | None = None,
) -> Roles:
    """The policy, its critic and its reference, in `layout` unless another one is given.

    The critic is a model of its own where its shape is given."""
    table = [role.with_remat("full") for role in role_table(config, layout.platform)]
    models = []
    for role in table:
        where = reference or layout if role.name == REFERENCE else layout
        own = Policy.from_config(replace(policy.config, head=role.head))
        if role.name == CRITIC and critic:
            role, own = replace(role, source="a model"), Policy.from_config(critic)
        models.append(RoleModel(role, own, where))
    losses = losses_of(table, config.algorithm, is_on_policy=config.updates_per_step == 1)
    return build_roles(models, losses, shapes, Receivers(models[0].dtype))
