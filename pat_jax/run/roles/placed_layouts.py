"""The layouts of a run's roles, each on the devices that its placement gives it.

Knows options, places and models. Does not know what runs in a layout.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from pat_jax.common.devices import Device
from pat_jax.common.owners import owners
from pat_jax.common.rules import require
from pat_jax.config.run import RunConfig
from pat_jax.engine.sizing.layout_choice import check_batch, wanted_layouts
from pat_jax.layout.chain import expert_ways, layout_chain, least_tp
from pat_jax.layout.layout import Layout
from pat_jax.layout.mesh import ExpertSplit, factored_mesh, hosts_of
from pat_jax.models.config import ModelConfig
from pat_jax.models.kernels.kernel_choice import Kernels
from pat_jax.planning.types import Split
from pat_jax.run.roles.places import Places
from pat_jax.training.carrier import Carrier, carriers


@dataclass(frozen=True)
class PlacedLayouts:
    policy: Layout  # of updates: the least TP that the policy's devices have
    reference: Layout
    rollouts: dict[Split, Layout]
    dropped: Sequence[str]  # why layouts of rollouts are missing
    # Of weights to rollouts on other devices, by their layout.
    carriers: Mapping[Split, Carrier]

    @classmethod
    def of(
        cls, config: RunConfig, model: ModelConfig, places: Places, kernels: Kernels | None
    ) -> "PlacedLayouts":
        chain, dropped = chain_of(config, model, places["rollout"], kernels)
        layouts = rollout_layouts(config, model, places["rollout"], chain)
        own = chain
        if places.differ("policy", "rollout"):
            own, _ = chain_of(config, model, places["policy"], kernels)
        policy = reference = next(iter(own.values()))
        if places.differ("reference", "policy"):
            least = least_tp(places["reference"], model, fsdp_size=config.fsdp_size)
            reference = replace(least, kernels=policy.kernels)
        if places.is_split:
            sent = _spread(config, model, places, chain)
        else:
            sent = {} if own is chain else carriers(own, chain)
            if own is not chain and policy.spans_processes:
                _check_experts(config, own, chain, sent)
        return cls(policy, reference, layouts, dropped, sent)


def _spread(
    config: RunConfig, model: ModelConfig, places: Places, chain: Mapping[Split, Layout]
) -> dict[Split, Carrier]:
    """Returns how weights come to the rollouts of all processes from the policy's processes.

    The devices of a host divide them (FSDP), so that each host receives one copy.

    Raises:
      OptionError: the model has experts, or meshes have the devices in another order.
    """
    need = config.placement.need
    need("name", model.experts is None, "another one with a model that has experts")
    hosts = len({*hosts_of(places.devices)})
    parts = hosts if hosts > 1 else len(owners(places.devices))
    divided = replace(config, fsdp_size=len(places.devices) // parts)
    source, target = (
        next(iter(chain_of(divided, model, places[role], None)[0].values()))
        for role in ("policy", "rollout")
    )
    first = target.mesh.devices.flat[: source.mesh.size]
    is_half = list(first) == list(source.mesh.devices.flat)
    need(
        "name", is_half, "another one on these devices, whose mesh is not in their processes' order"
    )
    return dict.fromkeys(chain, Carrier(source, target, spreads=True))


def _check_experts(
    config: RunConfig,
    own: Mapping[Split, Layout],
    chain: Mapping[Split, Layout],
    sent: Mapping[Split, Carrier],
) -> None:
    """Raises OptionError if experts would have to be sent between processes."""
    ways, of_rollout = expert_ways(own), expert_ways(chain)
    require(
        ways == of_rollout and len(sent) == len(chain),
        "rollout.expert_parallel",
        config.rollout.expert_parallel,
        "experts divided alike over the policy's and the rollouts' devices of each process "
        f"(they are divided by {math.prod(ways)} and {math.prod(of_rollout)})",
    )


def chain_of(
    config: RunConfig, model: ModelConfig, devices: Sequence[Device], kernels: Kernels | None
) -> tuple[dict[Split, Layout], list[str]]:
    """Returns all layouts of these devices, and why others are missing."""
    experts = ExpertSplit(config.rollout.expert_parallel, config.rollout.expert_width)
    mesh, size = factored_mesh(devices), config.fsdp_size
    return layout_chain(mesh, model, kernels, experts=experts, fsdp_size=size)


def rollout_layouts(
    config: RunConfig,
    model: ModelConfig,
    devices: Sequence[Device],
    chain: Mapping[Split, Layout],
) -> dict[Split, Layout]:
    """Returns those of the layouts that the options let rollouts use.

    Raises:
      UserError: the options ask for a layout that is not there, or prompts do not divide.
    """
    layouts = wanted_layouts(config.layout_choice, dict(chain), factored_mesh(devices), model)
    check_batch(config.rollout, layouts)
    return layouts
