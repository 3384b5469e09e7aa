"""Layouts: which mesh axes split the batch, which the model. The one place with partition specs.

The devices of a rollout form one mesh. Its axes are the prime factors of their number. Axes inside
a host are innermost; apart from that, the order is the one that gives the model the most layouts
(`division.py`). A layout takes the trailing axes for tensor parallelism (TP), innermost first, and
leaves the rest to data parallelism (DP). Raising TP takes axes over from DP. So each device already
holds its shard of every layout with higher TP. With a mesh of axes (a, b, c):

    dp8tp1   batch over (c, b, a)
    dp4tp2   batch over (b, a)      model over (c)
    dp2tp4   batch over (a)         model over (c, b)
    dp1tp8                          model over (c, b, a)

In both columns, the axes that a switch moves from one to the other are neighbours. So one
all-to-all carries the KV cache from any layout to any other.
"""

import math
from dataclasses import dataclass, replace
from typing import Any, Literal

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from pat_jax.common.devices import HOST_MEMORY, Device
from pat_jax.common.errors import UserError
from pat_jax.layout.division import dividing_run, undivided
from pat_jax.layout.mesh import hosts_of
from pat_jax.layout.rules import RULES, Role
from pat_jax.models.config import ModelConfig
from pat_jax.models.kernels.kernel_choice import Kernels
from pat_jax.models.lora import Lora
from pat_jax.models.policy import Params, Policy
from pat_jax.planning.types import Split

Axes = tuple[str, ...]


@dataclass(frozen=True)
class Backend:
    # Whether a burst is dispatched before the results of the previous one are known. On a CPU, the
    # host's work takes the devices' own cores.
    runs_ahead: bool
    # Whether a program that communicates must end before the next one is dispatched. XLA's CPU
    # devices share one pool of threads and start programs in any order: with two communicating
    # programs in flight, each device may wait in a different one, for ever.
    waits: bool
    # Whether a switch to lower TP gathers weights in the host's memory. XLA:CPU compiles an
    # all-gather to slow loops (seen: six times the processor time of copies on the host). Devices
    # with memories and links of their own run a program.
    gathers_on_host: bool
    # What a burst attends to: the pages in place, or a contiguous copy of them.
    cache: Literal["pages", "copy"]

    @classmethod
    def of(
        cls, platform: str, *, spans_processes: bool = False, reads_pages: bool = False
    ) -> "Backend":
        """Returns the behavior for a platform.

        Args:
          platform: the value of `jax.Device.platform`.
          spans_processes: whether the devices belong to several processes.
          reads_pages: whether an attention kernel reads pages; if not, accelerators gather them.
        """
        is_cpu = platform == "cpu"
        return cls(
            runs_ahead=not is_cpu,
            waits=is_cpu,
            gathers_on_host=is_cpu and not spans_processes,
            cache="copy" if is_cpu and not reads_pages else "pages",
        )


@dataclass(frozen=True)
class Layout:
    """A DP x TP split of one mesh, and the mesh axes that each axis name maps to under it."""

    mesh: Mesh
    kernels: Kernels  # which kernels compute attention and experts
    dp_axes: Axes = ()
    tp_axes: Axes = ()
    kv_axes: Axes = ()  # the leading run of tp_axes that divides the KV heads
    fsdp_axes: Axes = ()  # the leading run of dp_axes that divides the embedding (trainer only)
    ep_axes: Axes = ()  # the leading run of tp_axes and dp_axes that experts are divided over
    ep_width_axes: Axes = ()  # the axes behind ep_axes that each expert's width is divided over
    ep_fsdp_axes: Axes = ()  # ep_width_axes and other dp_axes that divide the width (trainer only)

    @property
    def split(self) -> Split:
        return Split(self.size(self.dp_axes), self.size(self.tp_axes))

    def __str__(self) -> str:
        return str(self.split)

    @property
    def devices(self) -> frozenset[Device]:
        return frozenset(self.mesh.devices.flat)

    @property
    def platform(self) -> str:
        return self.mesh.devices.flat[0].platform

    @property
    def backend(self) -> Backend:
        return Backend.of(
            self.platform,
            spans_processes=self.spans_processes,
            reads_pages=self.kernels.reads_pages,
        )

    @property
    def spans_processes(self) -> bool:
        """Whether some of the layout's devices belong to another process. This process cannot read
        their shards of an array."""
        return len({device.process_index for device in self.mesh.devices.flat}) > 1

    @property
    def crosses_hosts(self) -> bool:
        """Whether a replica has devices of several hosts."""
        hosts = np.array(hosts_of(list(self.mesh.devices.flat)))
        groups = hosts.reshape(-1, self.split.tp)  # TP takes the trailing axes
        return any(len(set(group)) > 1 for group in groups.tolist())

    def size(self, axes: Axes) -> int:
        return math.prod(self.mesh.shape[axis] for axis in axes)

    @property
    def group_axes(self) -> Axes:
        """The dp_axes across FSDP groups. Each group has all of the trainer's parameters, except
        experts that are divided over several groups."""
        return self.dp_axes[len(self.fsdp_axes) :]

    @property
    def query_axes(self) -> Axes:
        """The tp_axes that do not divide KV heads: they split the query heads of each KV head."""
        return self.tp_axes[len(self.kv_axes) :]

    @property
    def ep_tp_axes(self) -> Axes:
        """The tp_axes that divide the experts."""
        return tuple(axis for axis in self.ep_axes if axis in self.tp_axes)

    @property
    def ep_dp_axes(self) -> Axes:
        """The dp_axes that divide the experts: replicas along them have different experts."""
        return tuple(axis for axis in self.ep_axes if axis in self.dp_axes)

    def mesh_axes(self, name: str | None, role: Role = "rollout") -> Axes:
        """Returns the mesh axes that split an array's axis of this name, see `rules.py`."""
        if name is None:
            return ()
        field = RULES[role][name]
        return getattr(self, field) if field else ()

    def spec(self, *names: str | None, role: Role = "rollout") -> PartitionSpec:
        """Returns the partition spec of an array whose axes have these names."""
        return PartitionSpec(*(self.mesh_axes(name, role) or None for name in names))

    def sharding(self, *names: str | None, role: Role = "rollout") -> NamedSharding:
        return NamedSharding(self.mesh, self.spec(*names, role=role))

    def put(self, tree: Any, *names: str | None) -> Any:
        """Puts arrays of the host onto the devices, split as the axis `names` say.

        Every process holds all of each array and puts its own shards. With several processes,
        `jax.device_put` would compare the arrays of all processes at each call.
        """
        sharding = self.sharding(*names)
        if not self.spans_processes:
            return jax.device_put(tree, sharding)
        return jax.tree.map(
            lambda x: jax.make_array_from_callback(x.shape, sharding, lambda part: x[part]), tree
        )

    def param_specs(self, policy: Policy) -> Params:
        return jax.tree.map(lambda axes: self.spec(*axes), policy.param_axes, is_leaf=_is_axes)

    def param_shardings(
        self, policy: Policy | Lora, role: Role = "rollout", *leading: str
    ) -> Params:
        """Returns the sharding of each parameter.

        Args:
          leading: axis names of dimensions before those of the parameter.
        """
        return jax.tree.map(
            lambda axes: self.sharding(*leading, *axes, role=role),
            policy.param_axes,
            is_leaf=_is_axes,
        )


def _is_axes(node: object) -> bool:
    return isinstance(node, tuple)


def make_layout(
    mesh: Mesh,
    num_tp_axes: int,
    config: ModelConfig,
    kernels: Kernels | None = None,
    of_experts: tuple[Axes, Axes] = ((), ()),
    fsdp: Axes | None = None,
) -> Layout:
    """Returns the layout whose TP takes the `num_tp_axes` innermost mesh axes. Raises UserError if
    TP over these axes does not divide the model's heads, mlp or vocabulary.

    Args:
      of_experts: the result of `mesh.expert_axes`.
      kernels: the kernels to use; None uses all that the devices' platform has.
      fsdp: the result of `mesh.fsdp_axes`; None divides parameters over all devices.
    """
    outer = len(mesh.axis_names) - num_tp_axes
    dp_axes, tp_axes = mesh.axis_names[:outer][::-1], mesh.axis_names[outer:][::-1]

    def run(axes: Axes, number: int) -> Axes:
        return axes[: dividing_run([mesh.shape[axis] for axis in axes], number)]

    divided = dp_axes if fsdp is None else tuple(axis for axis in dp_axes if axis in fsdp)
    kv_axes, of_embed = run(tp_axes, config.num_kv_heads), run(divided, config.embed_dim)
    kernels = kernels or Kernels.of(mesh.devices.flat[0].platform)
    ep_axes, ep_width_axes = of_experts
    others = (axis for axis in divided if axis not in (*ep_axes, *ep_width_axes))
    width = config.experts.expert_dim if config.experts else 1
    ep_fsdp_axes = run((*ep_width_axes, *others), width)
    layout = Layout(
        mesh, kernels, dp_axes, tp_axes, kv_axes, of_embed, ep_axes, ep_width_axes, ep_fsdp_axes
    )
    if needed := undivided(config, [mesh.shape[axis] for axis in tp_axes]):
        raise UserError(
            f"layout {undivided_words(layout.split, needed, config)}; choose a smaller tp or --layout auto."
        )
    return layout


def undivided_words(split: Split, needed: str, config: ModelConfig) -> str:
    return (
        f"{split} needs {needed}: the {config.architecture} model (num_heads={config.num_heads}, "
        f"num_kv_heads={config.num_kv_heads}, mlp_dim={config.mlp_dim}) has none"
    )


def whole_on_each(layout: Layout) -> Layout:
    """Returns the layout with the same replicas, where each device holds a whole model and
    computes all rows of its replica."""
    none = {"fsdp_axes": (), "ep_axes": (), "ep_width_axes": (), "ep_fsdp_axes": ()}
    return replace(layout, tp_axes=(), kv_axes=(), **none)


def of_one_group(layout: Layout) -> Layout:
    """Returns the layout for the rows of one FSDP group: only its axes split the batch."""
    return replace(layout, dp_axes=layout.fsdp_axes)


def shard_bytes(tree: Any) -> int:
    """Returns the bytes that a tree of arrays, or of shapes with shardings, takes on the device
    that holds most of them. Arrays in host memory do not count."""
    groups = dict[int, tuple[set[Device], int]]()  # by the identity of a set, which a mesh keeps
    for x in jax.tree.leaves(tree):
        if x.sharding.memory_kind != HOST_MEMORY:
            devices = x.sharding.device_set
            size = math.prod(x.sharding.shard_shape(x.shape))
            _, before = groups.get(id(devices), (devices, 0))
            groups[id(devices)] = devices, before + size * x.dtype.itemsize
    if len(groups) == 1:
        return next(size for _, size in groups.values())
    every = set[Device]().union(*(devices for devices, _ in groups.values()))
    of_each = (sum(size for own, size in groups.values() if one in own) for one in every)
    return max(of_each, default=0)
