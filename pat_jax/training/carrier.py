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
    # Whether the source has the first half of the target's devices, in processes of their own. The
    # weights are then divided as those of updates (FSDP).
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
    """Returns, for each layout of the rollouts' devices, how weights come there from other devices.

    Weights are sent in the same TP degree if the source has it, else in the largest smaller one
    that both have. The rollout's devices then drop what they do not need, without a collective.
    With several processes, only TP degrees count at which each process holds all shards.

    Args:
      source, target: all layouts of the trainer's devices, and all of the rollouts' devices.

    Where experts are divided over several processes, some layouts have no carrier.
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
    """Returns the sizes of the axes that TP takes, innermost first. A layout whose cuts begin with
    those of another has parts of the other's shards."""
    return tuple(layout.mesh.shape[axis] for axis in layout.tp_axes)


def carried(tree: Any, shardings: Any) -> Any:
    """Copies arrays to the devices of `shardings`, which may be more, and frees or reuses the old
    buffers. With several processes, each may need only shards that its own devices hold."""
    first, *_ = leaves = jax.tree.leaves(tree)
    target, *_ = jax.tree.leaves(shardings)
    # On the same devices buffers are taken over. Those of others are freed with `tree`.
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
    """Copies shards between devices of this process. A device that holds its shard already keeps
    it. The others read it from its holders, in turn. A process that holds no shards gets zeros."""
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
    """Returns arrays with the shards of the mesh's first half on its second half, too.

    Call it in a program. Each device of the second half receives from the one at its place in the
    first half, whatever its own shard was.
    """
    axes, half = mesh.axis_names, mesh.size // 2

    def of_shards(tree: Any) -> Any:
        is_receiver = jax.lax.axis_index(axes) >= half
        pairs = [(i, half + i) for i in range(half)]

        def received(x: Array) -> Array:
            return jnp.where(is_receiver, jax.lax.ppermute(x, axes, pairs), x)

        return jax.tree.map(received, tree)

    # Replicas differ, so far.
    return jax.shard_map(of_shards, mesh=mesh, in_specs=(specs,), out_specs=specs, check_vma=False)(
        tree
    )


def _bounds(part: Any, shape: Sequence[int]) -> tuple[tuple[int, ...], ...]:
    """Returns the bounds of a shard on each axis as a key of dicts: slices cannot be keys."""
    return tuple(each.indices(size) for each, size in zip(part, shape, strict=True))
