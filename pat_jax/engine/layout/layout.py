"""Layouts: which mesh axes split the batch, which the model. The one place with partition specs.

The devices of a rollout form one mesh whose axes are the prime factors of their number, the fastest
links innermost. A layout takes the trailing axes for tensor parallelism (TP), innermost first, and
leaves the rest to data parallelism (DP). Raising TP takes axes over from DP, so every wider TP shard
is part of the shard that its device already holds. With a mesh of axes (a, b, c):

    dp8tp1   batch over (c, b, a)
    dp4tp2   batch over (b, a)      model over (c)
    dp2tp4   batch over (a)         model over (c, b)
    dp1tp8                          model over (c, b, a)

Both orders put the axes that change hands next to each other, which lets one all-to-all carry the
KV cache from any layout to any other.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import numpy as np
from jax.experimental import mesh_utils
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Int

from pat_jax.common.devices import Device
from pat_jax.common.errors import UserError
from pat_jax.engine.layout.backend import Backend
from pat_jax.engine.layout.rules import RULES, Role
from pat_jax.models.config import ModelConfig
from pat_jax.models.lora import Lora
from pat_jax.models.partition import Names, Partition, Whole
from pat_jax.models.policy import Params, Policy
from pat_jax.planning.types import Split

Axes = tuple[str, ...]


def prime_factors(n: int) -> list[int]:
    factors, divisor = [], 2
    while n > 1:
        while n % divisor == 0:
            factors.append(divisor)
            n //= divisor
        divisor += 1
    return factors


def hosts_of(devices: Sequence[Device]) -> list[int]:
    """Of each device its host, by a number: devices of the same one are joined by fast links.

    A TPU slice is one whatever number of machines it spans, and JAX numbers the hosts of GPUs the
    same way (`slice_index`, where a host may have several processes); elsewhere a process is a host.
    So it is with GPUs that are only compiled for: all of them say 0, and none has a hardware id. Those
    of other processes have none either, so that one of ours among them tells.
    """
    is_absent = all(getattr(device, "local_hardware_id", 0) is None for device in devices)
    counts = [getattr(device, "slice_index", None) for device in devices]
    platform = devices[0].platform
    if platform == "tpu":
        return [count or 0 for count in counts]
    if platform == "cpu" or is_absent or None in counts:
        return [device.process_index for device in devices]
    return [int(count) for count in counts if count is not None]


def factored_mesh(devices: Sequence[Device]) -> Mesh:
    """One mesh over all devices, one axis for each prime factor, fastest links innermost.

    The axes inside a host come after those across hosts, so that TP fills a host before it leaves
    it. Where hosts have unequal numbers of devices, no axes can be told apart like that; devices of
    a host are neighbours all the same.
    """
    hosts: dict[int, list[Device]] = {}
    host = dict(zip(devices, hosts_of(devices), strict=True))
    for device in sorted(devices, key=lambda device: (host[device], device.id)):
        hosts.setdefault(host[device], []).append(device)
    if len({len(host) for host in hosts.values()}) > 1:
        hosts = {0: [device for host in hosts.values() for device in host]}
    inside = prime_factors(len(next(iter(hosts.values()))))
    shape = [*prime_factors(len(hosts)), *inside] or [1]
    grid = np.stack([_host_grid(host, inside) for host in hosts.values()]).reshape(shape)
    names = tuple(f"axis{i}" for i in range(len(shape)))
    return Mesh(grid, names, axis_types=(AxisType.Auto,) * len(shape))


def _host_grid(devices: Sequence[Device], shape: Sequence[int]) -> np.ndarray:
    if devices[0].platform == "tpu" and len(devices) > 1:
        return mesh_utils.create_device_mesh(shape, devices, allow_split_physical_axes=True)
    grid = np.empty(len(devices), dtype=object)
    grid[:] = devices
    return grid.reshape(shape or ())


@dataclass(frozen=True)
class Layout:
    """A DP x TP split of one mesh, and the table from axis names to mesh axes that follows."""

    mesh: Mesh
    dp_axes: Axes
    tp_axes: Axes
    kv_axes: Axes  # the leading run of tp_axes that divides the KV heads
    fsdp_axes: Axes  # the leading run of dp_axes that divides the embedding (trainer only)

    @property
    def split(self) -> Split:
        return Split(self.size(self.dp_axes), self.size(self.tp_axes))

    def __str__(self) -> str:
        return str(self.split)

    @property
    def platform(self) -> str:
        return self.mesh.devices.flat[0].platform

    @property
    def backend(self) -> Backend:
        return Backend.of(self.platform, spans_processes=self.spans_processes)

    @property
    def spans_processes(self) -> bool:
        """Whether some of its devices are another process's, whose parts of an array this one cannot read."""
        return len({device.process_index for device in self.mesh.devices.flat}) > 1

    @property
    def crosses_hosts(self) -> bool:
        """Whether a TP group has devices of several hosts."""
        hosts = np.array(hosts_of(list(self.mesh.devices.flat)))
        groups = hosts.reshape(-1, self.split.tp)  # TP takes the trailing axes
        return any(len(set(group)) > 1 for group in groups.tolist())

    def size(self, axes: Axes) -> int:
        return math.prod(self.mesh.shape[axis] for axis in axes)

    @property
    def query_axes(self) -> Axes:
        """What the KV heads leave of TP: the queries that share one are split over it."""
        return self.tp_axes[len(self.kv_axes) :]

    def mesh_axes(self, name: str | None, role: Role = "rollout") -> Axes:
        """Those that split an array's axis of this name, by the table of `rules.py`."""
        if name is None:
            return ()
        if name not in RULES[role]:
            raise ValueError(f"axis name {name!r} has no row in engine/layout/rules.py.")
        field = RULES[role][name]
        return getattr(self, field) if field else ()

    def spec(self, *names: str | None, role: Role = "rollout") -> PartitionSpec:
        """How an array with these axes is split.

        Raises:
          ValueError: two of them are split over one mesh axis, or one has no row in the table.
        """
        parts, taken = [self.mesh_axes(name, role) for name in names], dict[str, str | None]()
        for name, part in zip(names, parts, strict=True):
            if shared := [axis for axis in part if axis in taken]:
                raise ValueError(
                    f"layout {self} splits {taken[shared[0]]!r} and {name!r} of one array over the "
                    f"same mesh axis, {shared[0]}; give one another row in engine/layout/rules.py."
                )
            taken |= dict.fromkeys(part, name)
        return PartitionSpec(*(part or None for part in parts))

    def sharding(self, *names: str | None, role: Role = "rollout") -> NamedSharding:
        return NamedSharding(self.mesh, self.spec(*names, role=role))

    def put(self, tree: Any, *names: str | None) -> Any:
        """Arrays of the host onto the devices; every process has all of them, and puts its own parts there.

        Over several processes `jax.device_put` would compare their arrays at each call.
        """
        sharding = self.sharding(*names)
        if not self.spans_processes:
            return jax.device_put(tree, sharding)
        return jax.tree.map(
            lambda x: jax.make_array_from_callback(x.shape, sharding, lambda part: x[part]), tree
        )

    def param_specs(self, policy: Policy, role: Role = "rollout") -> Params:
        return jax.tree.map(
            lambda axes: self.spec(*axes, role=role), policy.param_axes(), is_leaf=_is_axes
        )

    def param_shardings(self, policy: Policy | Lora, role: Role = "rollout") -> Params:
        return jax.tree.map(
            lambda axes: self.sharding(*axes, role=role), policy.param_axes(), is_leaf=_is_axes
        )


def _is_axes(node: object) -> bool:
    return isinstance(node, tuple)


def _dividing_run(mesh: Mesh, axes: Axes, size: int) -> Axes:
    run: Axes = ()
    for axis in axes:
        if size % math.prod(mesh.shape[a] for a in (*run, axis)):
            break
        run = (*run, axis)
    return run


def make_layout(mesh: Mesh, num_tp_axes: int, config: ModelConfig) -> Layout:
    """The layout whose TP takes the `num_tp_axes` innermost mesh axes.

    Raises:
      UserError: the model's heads, mlp or vocabulary cannot be divided that way.
    """
    inner_first = tuple(reversed(mesh.axis_names))
    outer = len(inner_first) - num_tp_axes
    tp_axes = inner_first[:num_tp_axes]
    dp_axes = tuple(reversed(mesh.axis_names[:outer]))
    layout = Layout(
        mesh,
        dp_axes,
        tp_axes,
        kv_axes=_dividing_run(mesh, tp_axes, config.num_kv_heads),
        fsdp_axes=_dividing_run(mesh, dp_axes, config.embed_dim),
    )
    queries = layout.size(layout.mesh_axes("queries_per_kv"))
    for what, size, ways in (
        ("num_heads / num_kv_heads", config.queries_per_kv, queries),
        ("mlp_dim", config.mlp_dim, layout.split.tp),
        ("padded vocab_size", config.padded_vocab_size, layout.split.tp),
    ):
        if size % ways:
            raise UserError(
                f"layout {layout} needs {what} = {size} divisible by {ways}: "
                f"the {config.architecture} model (num_heads={config.num_heads}, "
                f"num_kv_heads={config.num_kv_heads}, mlp_dim={config.mlp_dim}) has none; "
                f"choose a smaller tp or --layout auto."
            )
    return layout


def whole_on_each(layout: Layout) -> Layout:
    """The same groups of devices; each device has all of a model, and computes all rows of its group."""
    return replace(layout, tp_axes=(), kv_axes=(), fsdp_axes=())


def layout_chain(mesh: Mesh, config: ModelConfig) -> tuple[dict[Split, Layout], list[str]]:
    """Every layout that divides the model, lowest TP first, and why the others were dropped."""
    chain: dict[Split, Layout] = {}
    dropped: list[str] = []
    num_axes = 0 if mesh.size == 1 else len(mesh.axis_names)
    for num_tp_axes in range(num_axes + 1):
        try:
            layout = make_layout(mesh, num_tp_axes, config)
        except UserError as error:
            dropped.append(str(error))
            continue
        chain[layout.split] = layout
    return chain, dropped


def find_layout(
    chain: dict[Split, Layout],
    name: str,
    mesh: Mesh,
    config: ModelConfig,
    *,
    option: str = "layout",
) -> Layout:
    """The layout that the command line's `option` calls `name`.

    Raises:
      UserError: these devices have no such layout, or the model cannot be divided that way.
    """
    for layout in chain.values():
        if str(layout) == name:
            return layout
    for num_tp_axes in range(len(mesh.axis_names) + 1):
        tp = math.prod(mesh.devices.shape[len(mesh.axis_names) - num_tp_axes :])
        if name == str(Split(mesh.size // tp, tp)):
            try:
                make_layout(mesh, num_tp_axes, config)
            except UserError as error:
                raise UserError(f"option --{option} is {name!r}: {error}") from None
    raise UserError(
        f"option --{option} is {name!r}: {mesh.size} devices have the layouts "
        f"{', '.join(map(str, chain))}; choose one of them."
    )


def shard_bytes(x: jax.Array | jax.ShapeDtypeStruct) -> int:
    """Bytes of one device's part of an array."""
    assert x.sharding is not None  # an abstract array says where it will be
    return math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize


@dataclass(frozen=True)
class ManualPartition(Partition):
    """Inside `shard_map`: arrays are shards, sums and gathers are collectives over the layout's axes."""

    layout: Layout

    @property
    def platform(self) -> str:
        return self.layout.platform

    def sum(self, x: Array, *axes: str) -> Array:
        mesh_axes = tuple(a for name in axes for a in self.layout.mesh_axes(name))
        return jax.lax.psum(x, mesh_axes) if mesh_axes else x

    def gather(self, x: Array, axis: str) -> Array:
        mesh_axes = self.layout.mesh_axes(axis)
        return jax.lax.all_gather(x, mesh_axes, axis=x.ndim - 1, tiled=True) if mesh_axes else x

    def shard_index(self, axis: str) -> Int[Array, ""] | int:
        mesh_axes = self.layout.mesh_axes(axis)
        return jax.lax.axis_index(mesh_axes) if mesh_axes else 0

    def constrain(self, x: Array, *axes: str | None) -> Array:
        del axes
        return x


@dataclass(frozen=True)
class AutoPartition(Whole):
    """As a trainer's: arrays are whole, the compiler communicates, constraints steer it."""

    layout: Layout

    @property
    def platform(self) -> str:
        return self.layout.platform

    def constrain(self, x: Array, *axes: str | None) -> Array:
        return jax.lax.with_sharding_constraint(x, self.layout.sharding(*axes, role="train"))

    def on_shards(
        self,
        function: Callable[..., Array],
        inputs: Sequence[tuple[Array, Names]],
        output: Names,
    ) -> Array:
        arrays, names = zip(*inputs, strict=True)
        return jax.shard_map(
            function,
            mesh=self.layout.mesh,
            in_specs=tuple(self.layout.spec(*of, role="train") for of in names),
            out_specs=self.layout.spec(*output, role="train"),
            check_vma=False,  # kernels do not say over which axes their results vary
        )(*arrays)

    def by_rows(self, function: Callable[..., Any], whole: Any, *rows: Array) -> Any:
        """What `function` makes of each data-parallel shard of rows and of `whole`, which all have.

        Communication over data parallelism comes before and after it, never inside: `whole` is brought
        together once, and its gradient summed once. Tensor parallelism is left to the compiler.
        """
        dp_axes = self.layout.dp_axes
        if not dp_axes:
            return function(whole, *rows)
        by_rows = self.layout.spec("batch", role="train")

        def of_shard(whole: Any, *rows: Array) -> Any:
            # Told apart here, its gradients are summed here, and not wherever `function` uses it.
            return function(jax.lax.pcast(whole, dp_axes, to="varying"), *rows)

        return jax.shard_map(
            of_shard,
            mesh=self.layout.mesh,
            in_specs=(PartitionSpec(), *[by_rows] * len(rows)),
            out_specs=by_rows,
            axis_names=set(dp_axes),
        )(whole, *rows)
