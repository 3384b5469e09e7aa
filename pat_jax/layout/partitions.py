"""A model's collectives under a layout: explicit in rollouts, the compiler's in training."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, Mesh, NamedSharding
from jaxtyping import Array, Int

from pat_jax.layout.exchange import Exchange, exchanged
from pat_jax.layout.layout import Layout
from pat_jax.models.kernels.kernel_choice import Kernels
from pat_jax.models.partition import ByExpert, Names, Partition, Rows

# Tokens that experts compute at a time. Each token has one more row in memory per expert. With
# fewer tokens, a device spends more time reading its experts than multiplying with them.
EXPERT_TOKENS = 4096


@dataclass(frozen=True)
class ManualPartition(Partition):
    """The partition inside `shard_map`: arrays are shards, and sums and gathers are collectives
    over the layout's axes."""

    layout: Layout

    @property
    def kernels(self) -> Kernels:
        return self.layout.kernels

    def sum(self, x: Array, *axes: str) -> Array:
        mesh_axes = tuple(a for name in axes for a in self.layout.mesh_axes(name))
        return jax.lax.psum(x, mesh_axes) if mesh_axes else x

    def gather(self, x: Array, axis: str) -> Array:
        mesh_axes = self.layout.mesh_axes(axis)
        return jax.lax.all_gather(x, mesh_axes, axis=x.ndim - 1, tiled=True) if mesh_axes else x

    def shard_index(self, axis: str) -> Int[Array, ""] | int:
        mesh_axes = self.layout.mesh_axes(axis)
        return jax.lax.axis_index(mesh_axes) if mesh_axes else 0

    def num_shards(self, axis: str) -> int:
        return self.layout.size(self.layout.mesh_axes(axis))

    def by_expert(self, compute: ByExpert, rows: Rows, experts: Any) -> Array:
        """Gathers the rows of all replicas that hold other experts or parts of them, computes this
        device's experts, and scatters the sums back."""
        layout = self.layout
        over = *layout.ep_axes, *layout.ep_width_axes
        over_dp = tuple(axis for axis in over if axis in layout.dp_axes)
        over_tp = tuple(axis for axis in over if axis in layout.tp_axes)
        if over_dp:
            rows = jax.lax.all_gather(rows, over_dp, axis=0, tiled=True)
        first = self.shard_index("expert") * len(jax.tree.leaves(experts)[0])
        added = in_chunks(lambda some: compute(some, experts, first), rows)
        if over_dp:
            # In two dimensions: with three, the TPU compiler sums everything on every device.
            flat = added.reshape(-1, added.shape[-1])
            flat = jax.lax.psum_scatter(flat, over_dp, scatter_dimension=0, tiled=True)
            added = flat.reshape(-1, *added.shape[1:])
        return jax.lax.psum(added, over_tp) if over_tp else added


def in_chunks(function: Callable[[Rows], Array], rows: Rows, most: int = EXPERT_TOKENS) -> Array:
    """Applies `function` to rows, a few at a time if together they have more than `most` tokens.

    Args:
      rows: arrays whose first two dimensions are rows and tokens.
    """
    num_rows, length = jax.tree.leaves(rows)[0].shape[:2]
    least = min(-(-num_rows * length // most), num_rows)
    if least <= 1:
        return function(rows)
    count = next(n for n in range(least, num_rows + 1) if num_rows % n == 0)
    chunks = jax.tree.map(lambda x: x.reshape(count, num_rows // count, *x.shape[1:]), rows)
    done = jax.lax.map(function, chunks)
    return done.reshape(num_rows, *done.shape[2:])


@dataclass(frozen=True)
class AutoPartition(Partition):
    """The trainer's partition: arrays are global, and the compiler inserts the communication, which
    sharding constraints guide."""

    layout: Layout
    exchanges: bool = False  # send rows to their experts; False: gather the experts' weights

    @property
    def kernels(self) -> Kernels:
        return self.layout.kernels

    @property
    def _mesh(self) -> Mesh | AbstractMesh:
        """The layout's mesh; inside `shard_map`, the context's mesh."""
        context = jax.sharding.get_abstract_mesh()
        return context if context.manual_axes else self.layout.mesh

    def constrain(self, x: Array, *axes: str | None) -> Array:
        spec = self.layout.spec(*axes, role="train")
        return jax.lax.with_sharding_constraint(x, NamedSharding(self._mesh, spec))

    def look_up(self, table: Array, ids: Array) -> Array:
        """Devices with different parts of the embedding look ids up for each other. Devices with
        the same part exchange nothing; the compiler would replicate rows over them."""
        layout = self.layout
        dp_axes = self.layout.dp_axes
        over = self.layout.fsdp_axes
        if not over or over == dp_axes:
            return super().look_up(table, ids)

        def of_shard(table: Array, ids: Array) -> Array:
            rows = jnp.take(table, jax.lax.all_gather(ids, over, tiled=True), axis=0)
            return jax.lax.all_to_all(rows, over, split_axis=0, concat_axis=2, tiled=True)

        by_rows = layout.spec("batch", role="train")
        return jax.shard_map(
            of_shard,
            mesh=self._mesh,
            in_specs=(layout.spec(None, "embed", role="train"), by_rows),
            out_specs=by_rows,
            axis_names=set(dp_axes),
        )(table, ids)

    def on_shards(
        self,
        function: Callable[..., Array],
        inputs: Sequence[tuple[Array, Names]],
        output: Names,
    ) -> Array:
        arrays, names = zip(*inputs, strict=True)
        return jax.shard_map(
            function,
            mesh=self._mesh,
            in_specs=tuple(self.layout.spec(*of, role="train") for of in names),
            out_specs=self.layout.spec(*output, role="train"),
            check_vma=False,  # kernels do not declare over which axes their results vary
        )(*arrays)

    def by_expert(self, compute: ByExpert, rows: Rows, experts: Any) -> Array:
        """Each device of a replica computes a part of the experts. Replicas may hold
        different experts. With `exchanges`, rows are sent to the replicas of their experts.
        Otherwise each replica gathers the weights of all experts."""
        layout = self.layout
        over_dp = self.layout.ep_dp_axes
        over_tp = self.layout.ep_tp_axes
        sends_rows = self.exchanges and over_dp != ()

        def of_shard(rows: Rows, experts: Any) -> Array:
            # Experts of all replicas for this device's part of each.
            num_experts = len(jax.tree.leaves(experts)[0]) * layout.size(over_dp)
            first = num_experts * (jax.lax.axis_index(over_tp) if over_tp else 0)
            if sends_rows:
                exchange = Exchange.of(layout, rows.chosen.shape, num_experts)
                rows = rows._replace(chosen=rows.chosen - first)
                added: Array = exchanged(compute, exchange, rows, experts)
            else:
                if over_dp:
                    # Gathered explicitly, so that gradients are reduce-scattered: the compiler's
                    # own gather would all-reduce them.
                    experts = jax.lax.all_gather(experts, over_dp, tiled=True)
                added = compute(rows, experts, first)
            return jax.lax.psum(added, over_tp) if over_tp else added

        by_rows = layout.spec("batch", role="train")
        # Weights are sent in the data type that they are multiplied in.
        experts = jax.tree.map(lambda weight: weight.astype(rows.x.dtype), experts)
        return jax.shard_map(
            of_shard,
            mesh=self._mesh,
            in_specs=(by_rows, layout.spec("expert", role="train")),
            out_specs=by_rows,
            check_vma=False,
        )(rows, experts)

    def by_rows(self, function: Callable[..., Any], whole: Any, *rows: Any) -> Any:
        """Applies `function` to `whole`, which all replicas have, and each replica's shard of rows.

        Data parallelism communicates only before and after `function`: `whole` is gathered once,
        and its gradient is summed once. Tensor parallelism is left to the compiler.
        """
        dp_axes = self.layout.dp_axes
        if not dp_axes:
            return function(whole, *rows)
        by_rows = self.layout.spec("batch", role="train")

        def of_shard(whole: Any, *rows: Any) -> Any:
            # Varying from here on, so that its gradient is summed here, not at each use.
            return function(jax.lax.pcast(whole, dp_axes, to="varying"), *rows)

        return jax.shard_map(
            of_shard,
            mesh=self._mesh,
            in_specs=(self.layout.spec(), *[by_rows] * len(rows)),
            out_specs=by_rows,
            axis_names=set(dp_axes),
        )(whole, *rows)


def by_shard(layout: Layout, run: Callable, in_specs: Any, out_specs: Any) -> Callable:
    """Wraps `run` in `shard_map`: the program has only the collectives written in `run`."""
    specs = {"in_specs": in_specs, "out_specs": out_specs}
    return jax.shard_map(run, mesh=layout.mesh, check_vma=False, **specs)
