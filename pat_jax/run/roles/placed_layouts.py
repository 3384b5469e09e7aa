"""The layouts of a run's roles, each on the devices that its placement gives it.

Knows options, places and models. Does not know what runs in a layout.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from pat_jax.common.devices import Device
from pat_jax.common.owners import owners
from pat_jax.common.rules import require
from pat_jax.config.rollout import RolloutConfig
from pat_jax.config.shared import LayoutChoice
from pat_jax.engine.sizing.layout_choice import check_batch, wanted_layouts
from pat_jax.layout.chain import expert_ways, layout_chain
from pat_jax.layout.layout import Layout
from pat_jax.layout.mesh import ExpertSplit, factored_mesh, hosts_of
from pat_jax.models.config import ModelConfig
from pat_jax.models.kernels.kernel_choice import Kernels
from pat_jax.planning.types import Split
from pat_jax.run.roles.places import Places
from pat_jax.training.carrier import Carrier, carriers


@dataclass(frozen=True)
class PlacedLayouts:
    policy: Layout  # of updates: the layout with the least TP
    rollouts: dict[Split, Layout]
    dropped: Sequence[str]  # why layouts of rollouts are missing
    # Send weights to rollouts on other devices, by the layout of the rollout.
    carriers: Mapping[Split, Carrier]

    @classmethod
    def of(
        cls,
        model: ModelConfig,
        places: Places,
        rollout: RolloutConfig,
        choice: LayoutChoice,
        fsdp_size: int,
        kernels: Kernels | None = None,
    ) -> "PlacedLayouts":
        """Returns the layouts that divide the model.

        Args:
          choice: the layouts that rollouts may have.

        Raises:
          UserError: there are none, or the placement does not fit the model.
        """
        chain, dropped = chain_of(model, places["rollout"], rollout, fsdp_size, kernels)
        layouts = rollout_layouts(model, places["rollout"], rollout, choice, chain)
        own = chain
        if places.differ("policy", "rollout"):
            own, _ = chain_of(model, places["policy"], rollout, fsdp_size, kernels)
        policy = next(iter(own.values()))
        if places.is_split:
            sent = _spread(model, places, rollout, chain)
        else:
            sent = {} if own is chain else carriers(own, chain)
            if own is not chain and policy.spans_processes:
                _check_experts(rollout, own, chain, sent)
        return cls(policy, layouts, dropped, sent)


def _spread(
    model: ModelConfig, places: Places, rollout: RolloutConfig, chain: Mapping[Split, Layout]
) -> dict[Split, Carrier]:
    """Returns carriers of weights from the policy's processes to the rollouts of all processes. The
    devices of a host divide the weights (FSDP), so that each host receives one copy.

    Raises:
      OptionError: the model has experts, or meshes have the devices in another order.
    """
    option = "placement.name"
    name = "split"
    require(model.experts is None, option, name, "another one with a model that has experts")
    hosts = len({*hosts_of(places.devices)})
    parts = hosts if hosts > 1 else len(owners(places.devices))
    size = len(places.devices) // parts
    source, target = (
        next(iter(chain_of(model, places[role], rollout, size)[0].values()))
        for role in ("policy", "rollout")
    )
    first = target.mesh.devices.flat[: source.mesh.size]
    is_half = list(first) == list(source.mesh.devices.flat)
    expected = "another one on these devices, whose mesh is not in their processes' order"
    require(is_half, option, name, expected)
    return dict.fromkeys(chain, Carrier(source, target, spreads=True))


def _check_experts(
    rollout: RolloutConfig,
    own: Mapping[Split, Layout],
    chain: Mapping[Split, Layout],
    sent: Mapping[Split, Carrier],
) -> None:
    """Raises OptionError if experts would have to be sent between processes."""
    ways, of_rollout = expert_ways(own), expert_ways(chain)
    require(
        ways == of_rollout and len(sent) == len(chain),
        "rollout.expert_parallel",
        rollout.expert_parallel,
        "experts divided alike over the policy's and the rollouts' devices of each process "
        f"(they are divided by {math.prod(ways)} and {math.prod(of_rollout)})",
    )


def chain_of(
    model: ModelConfig,
    devices: Sequence[Device],
    rollout: RolloutConfig,
    fsdp_size: int,
    kernels: Kernels | None = None,
) -> tuple[dict[Split, Layout], list[str]]:
    """Returns all layouts of these devices, and why others are missing."""
    experts = ExpertSplit(rollout.expert_parallel, rollout.expert_width)
    mesh = factored_mesh(devices)
    return layout_chain(mesh, model, kernels, experts=experts, fsdp_size=fsdp_size)


def rollout_layouts(
    model: ModelConfig,
    devices: Sequence[Device],
    rollout: RolloutConfig,
    choice: LayoutChoice,
    chain: Mapping[Split, Layout],
) -> dict[Split, Layout]:
    """Returns those of the layouts that the options let rollouts use.

    Raises:
      UserError: the options ask for a layout that is not there, or prompts do not divide.
    """
    layouts = wanted_layouts(choice, dict(chain), factored_mesh(devices), model)
    check_batch(rollout, layouts)
    return layouts
