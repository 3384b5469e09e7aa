"""The chain of all layouts of one mesh for a model, lowest TP first; finds a layout by its name."""

import math
import re
from collections.abc import Mapping, Sequence

from jax.sharding import Mesh

from pat_jax.common.devices import Device
from pat_jax.common.errors import UserError
from pat_jax.layout.division import prime_factors, undivided
from pat_jax.layout.layout import Layout, make_layout, undivided_words
from pat_jax.layout.mesh import ExpertSplit, expert_axes, factored_mesh, fsdp_axes
from pat_jax.models.config import ModelConfig
from pat_jax.models.kernels.kernel_choice import Kernels
from pat_jax.planning.types import Split


def layout_chain(
    mesh: Mesh,
    config: ModelConfig,
    kernels: Kernels | None = None,
    experts: ExpertSplit | None = None,
    fsdp_size: int = 0,
) -> tuple[dict[Split, Layout], list[str]]:
    """Returns every layout of the mesh's devices that divides the model, and messages that say why
    others do not. Raises OptionError if the experts or parameters cannot be divided as asked.

    The lowest TP comes first. The layouts share one new mesh, made by `factored_mesh`.

    Args:
      kernels: the kernels to use; None uses all that the devices' platform has.
      experts: how to divide the experts; None divides them over the devices of a host.
      fsdp_size: see `mesh.fsdp_axes`.
    """
    mesh = factored_mesh(list(mesh.devices.flat), config)
    of_experts = expert_axes(mesh, config, experts or ExpertSplit())
    fsdp = fsdp_axes(mesh, fsdp_size)
    chain: dict[Split, Layout] = {}
    dropped: list[str] = []
    num_axes = 0 if mesh.size == 1 else len(mesh.axis_names)
    for num_tp_axes in range(num_axes + 1):
        try:
            layout = make_layout(mesh, num_tp_axes, config, kernels, of_experts, fsdp)
        except UserError as error:
            dropped.append(str(error))
            continue
        chain[layout.split] = layout
    return chain, dropped


def least_tp(devices: Sequence[Device], config: ModelConfig, fsdp_size: int = 0) -> Layout:
    """Returns the layout of these devices with the least TP that divides the model. Updates use it,
    and models that are only read. The arguments are those of `layout_chain`."""
    chain, _ = layout_chain(factored_mesh(devices), config, fsdp_size=fsdp_size)
    return next(iter(chain.values()))


def kv_ways(layouts: Mapping[Split, Layout]) -> dict[int, int]:
    """Returns, for each layout's TP degree, over how many devices the KV heads are divided."""
    return {split.tp: layout.size(layout.kv_axes) for split, layout in layouts.items()}


def expert_ways(layouts: Mapping[Split, Layout]) -> tuple[int, int]:
    """Returns over how many devices the experts, and the width of each, are divided. All layouts
    have the same values."""
    layout = next(iter(layouts.values()))
    return layout.size(layout.ep_axes), layout.size(layout.ep_width_axes)


def find_layout(chain: dict[Split, Layout], name: str, mesh: Mesh, config: ModelConfig) -> Layout:
    """Returns the layout called `name`, the value of `--layout`. Raises UserError if these devices
    have no such layout, or it does not divide the model."""
    for layout in chain.values():
        if str(layout) == name:
            return layout
    raise UserError(
        f"option --layout is {name!r}: {_why_not(name, mesh, config)}; with this model "
        f"{mesh.size} devices have the layouts {', '.join(map(str, chain))}; choose one of them."
    )


def _why_not(name: str, mesh: Mesh, config: ModelConfig) -> str:
    found = re.fullmatch(r"dp(\d+)tp(\d+)", name, re.ASCII)
    split = Split(int(found[1]), int(found[2])) if found else Split(0, 0)
    if split.dp * split.tp != mesh.size:
        return f"expected dp and tp whose product is the number of devices, {mesh.size}"
    sizes = list(reversed(factored_mesh(list(mesh.devices.flat), config).devices.shape))
    by_degree = {math.prod(sizes[:taken]): sizes[:taken] for taken in range(len(sizes) + 1)}
    tp = by_degree.get(split.tp, prime_factors(split.tp))
    if needed := undivided(config, tp):
        return undivided_words(split, needed, config)
    # Another order of the axes would have it.
    return (
        f"tp takes whole axes of the devices, of {', '.join(map(str, sizes))} in this order, so that tp "
        f"is one of {', '.join(map(str, by_degree))}"
    )
