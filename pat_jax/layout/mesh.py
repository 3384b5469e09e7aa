"""The one mesh of a rollout's devices: which devices share a host, and the order of the axes.

Knows devices and their hosts. Does not know what is split over which axis (`layout.py`).
"""

import math
from collections.abc import Collection, Sequence
from itertools import combinations_with_replacement
from typing import NamedTuple

import numpy as np
from jax.experimental import mesh_utils
from jax.sharding import AxisType, Mesh

from pat_jax.common.devices import Device
from pat_jax.common.rules import require
from pat_jax.layout.division import best_order, prime_factors, with_padding
from pat_jax.models.config import ModelConfig


def hosts_of(devices: Sequence[Device]) -> list[int]:
    """Returns the host number of each device. Fast links join the devices of a host.

    A TPU slice counts as one host, even if it spans several machines. The hosts of GPUs are
    numbered by `slice_index`; a host may have several processes. On CPUs and without `slice_index`
    a process is a host. The same holds for GPUs that are only compiled for, whose `slice_index` is
    always 0. They have no `local_hardware_id`; attached GPUs of this process have one.
    """
    is_absent = all(getattr(device, "local_hardware_id", 0) is None for device in devices)
    counts = [getattr(device, "slice_index", None) for device in devices]
    platform = devices[0].platform
    if platform == "tpu":
        return [count or 0 for count in counts]
    if platform == "cpu" or is_absent or None in counts:
        return [device.process_index for device in devices]
    return [int(count) for count in counts if count is not None]


def factored_mesh(devices: Sequence[Device], config: ModelConfig | None = None) -> Mesh:
    """Returns one mesh over all devices, with one axis per prime factor, fastest links innermost.

    The axes inside a host come after those across hosts, so that TP fills a host before it leaves
    it. If hosts have unequal numbers of devices, axes are not separated like that, but the devices
    of a host are still neighbours.

    Args:
      config: the model to order the axes for, so that it has the most layouts. Axes inside a host
        and axes across hosts are ordered separately. None orders them ascending.
    """
    hosts = _hosts(devices)
    across = prime_factors(len(hosts))
    inside = prime_factors(len(hosts[0]))
    if config is not None:
        across, inside = best_order(config, across, inside)
    shape = [*across, *inside] or [1]
    grid = np.stack([_host_grid(host, inside) for host in hosts]).reshape(shape)
    names = tuple(f"axis{i}" for i in range(len(shape)))
    return Mesh(grid, names, axis_types=(AxisType.Auto,) * len(shape))


def padded_for(
    devices: Sequence[Device], config: ModelConfig, degrees: Collection[int] = ()
) -> ModelConfig:
    """Returns the model padded by `division.with_padding` for these devices."""
    hosts = _hosts(devices)
    across = prime_factors(len(hosts))
    inside = prime_factors(len(hosts[0]))
    return with_padding(config, across, inside, degrees)


class ExpertSplit(NamedTuple):
    """How the user asks to divide the experts of each layer."""

    parallel: int = 0  # number of parts of the experts; 0: as many devices of a host as divide them
    width: int = 1  # number of devices that share the width of one expert


def expert_axes(
    mesh: Mesh, config: ModelConfig, asked: ExpertSplit
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Returns the axes that divide a model's experts, and the next axes, which divide the width of
    each. Raises OptionError if no run of axes has the asked number of devices and divides the
    experts or width.

    Both are innermost first and the same in every layout.
    """
    names = mesh.axis_names[::-1]
    devices = list(mesh.devices.flat)
    asked = asked._replace(width=asked.width or 1)  # None: it is not settled
    of = config.experts
    num_experts, width = (of.num_experts, of.expert_dim) if of else (1, 1)
    runs: dict[tuple[int, int], tuple[int, int]] = {}
    for i, j in combinations_with_replacement(range(len(names) + 1), 2):
        ways = tuple(math.prod(mesh.shape[x] for x in part) for part in (names[:i], names[i:j]))
        if num_experts % ways[0] == 0 == width % ways[1]:
            runs.setdefault((ways[0], ways[1]), (i, j))
    kind = (
        f"the model's {num_experts} experts of width {width}" if of else "a model without experts"
    )
    widths = sorted({b for a, b in runs if asked.parallel in (0, a)} | {1})
    require(
        asked.width in widths,
        "rollout.expert_width",
        asked.width,
        f"of {len(devices)} devices and {kind} one of {', '.join(map(str, widths))}",
    )
    parallel = sorted(a for a, b in runs if b == asked.width)
    inside = len(_hosts(devices)[0]) // asked.width
    require(
        asked.parallel in (0, *parallel),
        "rollout.expert_parallel",
        asked.parallel,
        f"0, or of {len(devices)} devices and {kind} one of {', '.join(map(str, parallel))}",
    )
    found = asked.parallel or max([a for a in parallel if a <= inside], default=parallel[0])
    i, j = runs[found, asked.width]
    return names[:i], names[i:j]


def fsdp_axes(mesh: Mesh, size: int) -> tuple[str, ...]:
    """Returns the axes, innermost first, over which trained parameters may be divided. Raises
    OptionError if no run of axes has this number of devices.

    Args:
      size: number of devices with different parts of the parameters; other devices have copies. 0
        stands for all devices, as does their number or any larger one.
    """
    names = mesh.axis_names[::-1]
    ways = [math.prod(mesh.shape[x] for x in names[:i]) for i in range(len(names) + 1)]
    if size == 0 or size >= mesh.size:
        return names
    expected = f"0, or of {mesh.size} devices one of {', '.join(map(str, ways))}"
    require(size in ways, "fsdp_size", size, expected)
    return names[: ways.index(size)]


def _hosts(devices: Sequence[Device]) -> list[list[Device]]:
    """The devices of each host, or all in one list if hosts have unequal numbers of devices."""
    hosts: dict[int, list[Device]] = {}
    host = dict(zip(devices, hosts_of(devices), strict=True))
    for device in sorted(devices, key=lambda device: (host[device], device.id)):
        hosts.setdefault(host[device], []).append(device)
    if len({len(host) for host in hosts.values()}) > 1:
        return [[device for host in hosts.values() for device in host]]
    return list(hosts.values())


def _host_grid(devices: Sequence[Device], shape: Sequence[int]) -> np.ndarray:
    if devices[0].platform == "tpu" and len(devices) > 1:
        return mesh_utils.create_device_mesh(shape, devices, allow_split_physical_axes=True)
    grid = np.empty(len(devices), dtype=object)
    grid[:] = devices
    return grid.reshape(shape or ())
