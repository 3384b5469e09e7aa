"""Carries weights from the trainer's devices to other devices, on which rollouts run.

The trainer gathers weights into the shards that the rollout's devices need. Then each process
copies shards between its own devices: no link between processes is used. Where only half of the
processes hold the policy, each sends its shards to one of the others (`passed_on`). Knows layouts
and shards. Does not know how weights are rounded, nor whether they arrived (`transfer.py`).
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from pat_jax.common.devices import Device
from pat_jax.layout.layout import Layout
from pat_jax.layout.rules import Role
from pat_jax.models.policy import Policy
from pat_jax.planning.types import Split
from pat_jax.training.rest import moved


class Carrier(NamedTuple):
    """Two layouts with the same shards on different devices: the form in which weights are sent."""

    source: Layout
    target: Layout
    # Whether the source's devices are the first half of the target's, owned by half of the
    # processes. The weights are then sharded as in updates (FSDP).
    spreads: bool = False

    def sent(self, policy: Policy) -> Any:
        """Returns the shardings of the weights that the source sends."""
        return self.source.param_shardings(policy, self._role)

    def arriving(self, policy: Policy) -> Any:
        """Returns the shardings of the weights that the target receives."""
        return self.target.param_shardings(policy, self._role)

    @property
    def _role(self) -> Role:
        return "train" if self.spreads else "rollout"


def carriers(
    source: Mapping[Split, Layout], target: Mapping[Split, Layout]
) -> dict[Split, Carrier]:
    """Returns, for each layout of the rollouts' devices, the layouts in which weights are sent.

    Weights are sent in the rollout's TP degree if the source has it, else in the largest smaller
    degree that both have. The rollout's devices then drop what they do not need, without a
    collective. With several processes, each must hold all shards of the model at that TP degree.
    Where experts are divided over several processes, some layouts have no carrier.

    Args:
      source, target: all layouts of the trainer's devices, and all of the rollouts' devices.
    """
    sources, targets = (
        {_cuts(each): each for each in x.values() if is_whole_in_each_process(each)}
        for x in (source, target)
    )
    common = sources.keys() & targets.keys()
    found: dict[Split, Carrier] = {}
    for split, layout in target.items():
        cuts = _cuts(layout)
        if usable := [inner for inner in common if cuts[: len(inner)] == inner]:
            most = max(usable, key=len)
            found[split] = Carrier(sources[most], targets[most])
    return found


def is_whole_in_each_process(layout: Layout) -> bool:
    """Whether each process holds all shards of a model."""
    of_experts = layout.size(layout.ep_axes) * layout.size(layout.ep_width_axes)
    num_shards = max(layout.split.tp, of_experts)  # both take the trailing axes
    held: dict[int, set[int]] = {}
    for replica in layout.mesh.devices.reshape(-1, num_shards).tolist():
        for shard, device in enumerate(replica):
            held.setdefault(device.process_index, set()).add(shard)
    return all(len(shards) == num_shards for shards in held.values())


def _cuts(layout: Layout) -> tuple[int, ...]:
    """Returns the sizes of the mesh axes of TP, innermost first. If one layout's sizes begin with
    another's, each of its shards is a part of one of the other's."""
    return tuple(layout.mesh.shape[axis] for axis in layout.tp_axes)


def carried(tree: Any, shardings: Any) -> Any:
    """Returns arrays copied to `shardings`, maybe to more devices; frees or reuses their buffers.
    With several processes, each must already hold every shard that its devices need."""
    first, *_ = leaves = jax.tree.leaves(tree)
    target, *_ = jax.tree.leaves(shardings)
    # On the same devices, the new arrays reuse the buffers. On other devices, they are freed here.
    is_apart = first.sharding.device_set.isdisjoint(target.device_set)
    if first.sharding.is_fully_addressable:
        return moved(tree, shardings) if is_apart else jax.device_put(tree, shardings)
    there = copied_inside(leaves, jax.tree.leaves(shardings))
    for leaf in leaves if is_apart else ():
        leaf.delete()
    return jax.tree.unflatten(jax.tree.structure(tree), there)


def copied_inside(
    leaves: Sequence[jax.Array], shardings: Sequence[jax.sharding.Sharding]
) -> list[jax.Array]:
    """Returns arrays whose shards are copied between devices of this process. A device keeps a
    shard that it has; others copy it from the holders in turn. Without any shard they get zeros."""
    shards: list[jax.Array | np.ndarray] = []
    devices: list[Device] = []
    for leaf, sharding in zip(leaves, shardings, strict=True):
        held: dict[tuple, list[jax.Array]] = {}
        for shard in leaf.addressable_shards:
            held.setdefault(_bounds(shard.index, leaf.shape), []).append(shard.data)
        wanted = sharding.addressable_devices_indices_map(leaf.shape)
        devices += wanted
        if not held:
            zeros = np.zeros(sharding.shard_shape(leaf.shape), leaf.dtype)
            shards += [zeros] * len(wanted)
            continue
        for i, (device, part) in enumerate(wanted.items()):
            same = held[_bounds(part, leaf.shape)]
            own = (shard for shard in same if device in shard.devices())
            shards.append(next(own, same[i % len(same)]))
    copies = iter(jax.device_put(shards, devices))
    return [
        jax.make_array_from_single_device_arrays(
            leaf.shape, sharding, [next(copies) for _ in sharding.addressable_devices]
        )
        for leaf, sharding in zip(leaves, shardings, strict=True)
    ]


def passed_on(tree: Any, mesh: jax.sharding.Mesh, specs: Any) -> Any:
    """Returns arrays whose shards on the second half of the mesh are those of its first half.

    It is called in a jitted program. Device number i of the second half receives the shard of
    device number i of the first half.
    """
    axes = mesh.axis_names
    half = mesh.size // 2

    def of_shards(tree: Any) -> Any:
        is_receiver = jax.lax.axis_index(axes) >= half
        pairs = [(i, half + i) for i in range(half)]

        def received(x: Array) -> Array:
            return jnp.where(is_receiver, jax.lax.ppermute(x, axes, pairs), x)

        return jax.tree.map(received, tree)

    # The halves hold different values, so `shard_map` may not check that they are replicas.
    return jax.shard_map(of_shards, mesh=mesh, in_specs=(specs,), out_specs=specs, check_vma=False)(
        tree
    )


def _bounds(part: Any, shape: Sequence[int]) -> tuple[tuple[int, ...], ...]:
    """Returns (start, stop) of a shard on each axis; unlike slices, these can be keys of a dict."""
    return tuple(each.indices(size) for each, size in zip(part, shape, strict=True))
