"""Builds the models of a run over devices that are not here.

Knows which models an order names. Does not know which of their programs are compiled (`jobs.py`).
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache
from typing import Protocol

from pat_jax.common.devices import Device
from pat_jax.config.by_model import settled_dtype
from pat_jax.config.compute import Compute
from pat_jax.config.run import RunConfig
from pat_jax.engine.device.draft.drafter import Drafter
from pat_jax.layout.chain import least_tp
from pat_jax.layout.layout import Layout
from pat_jax.models.config import ModelConfig
from pat_jax.models.policy import Policy
from pat_jax.planning.types import Split
from pat_jax.training.build import DTYPES, micro_shapes, predictor_of
from pat_jax.training.build_roles import CriticModel, build_roles
from pat_jax.training.reader import Reader
from pat_jax.training.roles import TEACHER, Roles
from pat_jax.training.trainable_params import TrainableParams
from pat_jax.training.trainer import CRITIC


class NamedModels(Protocol):
    """An order: its options, and its models beside the policy."""

    @property
    def config(self) -> RunConfig: ...

    @property
    def others(self) -> Mapping[str, ModelConfig]: ...

    def other(self, name: str, layers: int) -> ModelConfig: ...


@cache  # several builds of a plan have the same one
def policy_of(model: ModelConfig) -> Policy:
    return Policy.from_config(model)


def roles_of(
    order: NamedModels,
    devices: Sequence[Device],
    layouts: dict[Split, Layout],
    drafter: Drafter,
    model: ModelConfig,
) -> Roles:
    """Returns the models of a run whose policy is `model`, each in its layout with the least TP."""
    first, config = next(iter(layouts.values())), order.config
    others = {name: order.other(name, model.num_layers) for name in order.others}
    of_values = others.pop(CRITIC, None)
    critic = None
    if of_values is not None:
        critic = CriticModel(
            policy_of(of_values),
            least_tp(devices, of_values, fsdp_size=config.fsdp_size),
            config.critic.model,
        )
    shapes = micro_shapes(config.micro_batches, first.split.dp, first.platform)
    more = {
        name: _reader(
            config,
            name,
            policy_of(other),
            least_tp(devices, other, fsdp_size=config.fsdp_size),
            shapes,
        )
        for name, other in others.items()
    }
    teacher = {name: reader for name, reader in more.items() if name == TEACHER}
    scoring = [reader for name, reader in more.items() if name != TEACHER]
    resident = [tree for reader in scoring for tree in reader.resident]
    parts = layouts, drafter, teacher, resident, critic
    roles = build_roles(config, Policy.from_config(model), first, *parts)
    return replace(roles, readers={**roles.readers, **more})


def _reader(
    config: RunConfig,
    name: str,
    policy: Policy,
    layout: Layout,
    shapes: Sequence[tuple[int, int]],
) -> Reader:
    """A frozen model that reads the responses in the policy's micro-batches."""
    if name != TEACHER:
        dtype = settled_dtype(config.reward_model.dtype, layout.platform, is_checkpoint=True)
        config = replace(config, compute_dtype=dtype)
    dtype = DTYPES[config.compute_dtype]
    held = TrainableParams(policy, layout, compute_dtype=dtype, weight_dtype=dtype)
    predictor = predictor_of(
        Compute(config.compute_dtype), policy, layout, temperature=config.rollout.temperature
    )
    top_k = config.teacher.top_k if name == TEACHER else 0
    return Reader(name, held, predictor, shapes, rests=config.roles.rest == "host", top_k=top_k)
