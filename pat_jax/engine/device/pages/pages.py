"""The programs that move pages between two layouts or replicas: pack, exchange, unpack.

A round of a migration packs as many pages of each replica as a staging buffer holds, and exchanges
the buffers. It unpacks them into the target's pool, which uses the same memory, at once or when
there is room (`relocation/order.py`). Buffers have a few fixed sizes. So three kinds of small
programs move any pages between any two layouts, and only pages in use are sent.

The layout with less TP is the narrow one, the other the wide one; a wide replica is several narrow
ones merged.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from pat_jax.engine.relocation.rounds import ALL, Round
from pat_jax.engine.sequences.page_allocator import NULL_PAGE
from pat_jax.engine.sequences.state import Pool
from pat_jax.layout.layout import Axes, Layout
from pat_jax.layout.partitions import by_shard
from pat_jax.models.cache.paged_layer import KV_AXES

# Page, KV head, keys and values of every layer, token of the page, head dimension.
PAGE_AXES = (*KV_AXES, None)
Buffer = Float[Array, "pages kv_heads arrays page_size head_dim"]


@dataclass(frozen=True)
class Exchange:
    """The communication between two layouts of one chain: which devices, along which mesh axes."""

    narrow: Layout
    wide: Layout
    is_up: bool  # TP rises: from narrow to wide
    heads: Axes  # axes that split KV heads in the wide layout and rows in the narrow: all-to-all
    copies: Axes  # axes over which the wide layout replicates KV heads: all-gather

    @classmethod
    def between(cls, source: Layout, target: Layout) -> "Exchange":
        narrow, wide = sorted((source, target), key=lambda layout: layout.split.tp)
        taken = wide.tp_axes[len(narrow.tp_axes) :]
        heads = wide.kv_axes[len(narrow.kv_axes) :]
        copies = tuple(axis for axis in taken if axis not in heads)
        return cls(narrow, wide, target is wide, heads, copies)

    @property
    def num_heads(self) -> int:
        """The number of devices of the wide layout that share the KV heads of one device of the
        narrow layout."""
        return self.wide.size(self.heads)

    @property
    def members(self) -> np.ndarray:
        """The numbers of the narrow replicas that make up each wide replica, in the order of the
        buffers of `all`; int[wide replicas, members]."""
        # Narrow replicas count (heads, copies, remaining DP), outermost first; the gather over
        # `copies` comes last and so lies outside the all-to-all over `heads`.
        heads = self.num_heads
        copies = self.wide.size(self.copies)
        replicas = np.arange(self.narrow.split.dp).reshape(heads, copies, self.wide.split.dp)
        return replicas.transpose(2, 1, 0).reshape(self.wide.split.dp, copies * heads)

    @property
    def staged(self) -> int:
        """A device's staging memory while a round is sent, in page parts per page of the round. A
        page part has the KV heads that one device of the wide layout holds."""
        # A narrow buffer, and as many wide ones as there are members, packed and concatenated.
        return self.num_heads + 2 * self.members.shape[1]

    def arrived(self, step: Round) -> int:
        """Returns how many page parts per page a device holds of a round until it is unpacked."""
        if not self.is_up:
            return self.num_heads
        return self.members.shape[1] if step.replica == ALL else 1

    @property
    def most_staged(self) -> int:
        """The sum of `staged` and the page parts of two large rounds that wait to be unpacked. No
        more may wait (`order.MOST_WAITING`)."""
        return self.staged + 2 * self.arrived(Round(ALL, 1))

    @property
    def copies_sent(self) -> int:
        """The number of page parts that are sent between devices for each page.

        No migration could send fewer: a device that already holds a part does not receive it.
        """
        sent = self.members.shape[1] if self.is_up else self.num_heads
        return (sent - 1) * self.narrow.split.tp

    def all(self) -> Callable[[tuple[Buffer, ...]], tuple[Buffer, ...]]:
        """Returns the program of a round in which every narrow replica takes part.

        If TP rises, a device's buffer becomes one buffer for each member; if TP falls, the reverse.
        """
        num_members = self.members.shape[1]

        def up(buffers: tuple[Buffer, ...]) -> tuple[Buffer, ...]:
            (x,) = buffers
            if self.heads:
                x = jax.lax.all_to_all(x, self.heads, split_axis=1, concat_axis=0, tiled=True)
            if self.copies:
                x = jax.lax.all_gather(x, self.copies, axis=0, tiled=True)
            return tuple(jnp.split(x, num_members))

        def down(buffers: tuple[Buffer, ...]) -> tuple[Buffer, ...]:
            x = jnp.concatenate(buffers)
            if self.copies:
                size = x.shape[0] // self.wide.size(self.copies)
                mine = jax.lax.axis_index(self.copies) * size
                x = jax.lax.dynamic_slice_in_dim(x, mine, size)
            if self.heads:
                x = jax.lax.all_to_all(x, self.heads, split_axis=0, concat_axis=1, tiled=True)
            return (x,)

        return self._mapped(up if self.is_up else down)

    def one(self) -> Callable[[Int[Array, ""], tuple[Buffer, ...]], tuple[Buffer, ...]]:
        """Returns the program of a round of only one narrow replica, whose number is an argument.

        The content of the other replicas' buffers is undefined afterwards.
        """
        # One program with a branch per replica costs next to nothing, where one program per replica
        # would multiply them. Only a GPU's host has to wait until the replica's number is read.
        branches = [self._of(replica) for replica in range(self.narrow.split.dp)]

        def run(replica: Int[Array, ""], buffers: tuple[Buffer, ...]) -> tuple[Buffer, ...]:
            return jax.lax.switch(replica, branches, buffers)

        return self._mapped(run, num_scalars=1)

    def _of(self, replica: int) -> Callable[[tuple[Buffer, ...]], tuple[Buffer, ...]]:
        """The function that every device runs in a round of `replica`."""
        num_heads = self.num_heads
        dp_axes = self.narrow.dp_axes
        members = next(row for row in self.members.tolist() if replica in row)
        axes, place = _in_mesh_order(self.narrow)

        def sent(x: Buffer, source: int, target: int) -> Buffer:
            pair = place[source], place[target]
            return x if source == target else jax.lax.ppermute(x, axes, [pair])

        def up(buffers: tuple[Buffer, ...]) -> tuple[Buffer, ...]:
            me = jax.lax.axis_index(dp_axes)
            parts = jnp.split(buffers[0], num_heads, axis=1)
            received = jnp.zeros_like(parts[0])
            for i, target in enumerate(members):
                part = sent(parts[i % num_heads], replica, target)
                received = jnp.where(me == target, part, received)
            return (received,)

        def down(buffers: tuple[Buffer, ...]) -> tuple[Buffer, ...]:
            # KV heads may have several copies: the group that includes the replica itself sends.
            first = members.index(replica) // num_heads * num_heads
            senders = members[first : first + num_heads]
            parts = [sent(buffers[0], sender, replica) for sender in senders]
            return (jnp.concatenate(parts, axis=1),)

        return up if self.is_up else down

    def _mapped(self, run: Callable, num_scalars: int = 0) -> Callable:
        source, target = (self.narrow, self.wide) if self.is_up else (self.wide, self.narrow)
        taken = (*[source.spec()] * num_scalars, source.spec(*PAGE_AXES))
        return by_shard(source, run, taken, target.spec(*PAGE_AXES))


def part_bytes(layout: Layout, pool: Pool) -> int:
    """Returns the bytes of one page's part on one device of `layout`."""
    ways = layout.size(layout.kv_axes)
    return sum(math.prod(x.shape[1:]) // ways * x.dtype.itemsize for x in jax.tree.leaves(pool))


def shift(layout: Layout) -> Callable[[Int[Array, ""], Buffer], Buffer]:
    """Returns the program that sends each replica's buffer `distance` replicas further, in a ring.

    The distance, 1 to replicas - 1, is an argument of the program.
    """
    axes, place = _in_mesh_order(layout)
    replicas = len(place)

    def by(distance: int) -> Callable[[Buffer], Buffer]:
        pairs = [(at, place[(replica + distance) % replicas]) for replica, at in enumerate(place)]
        return lambda buffer: jax.lax.ppermute(buffer, axes, pairs)

    branches = [by(distance) for distance in range(1, replicas)]
    buffers = layout.spec(*PAGE_AXES)

    def run(distance: Int[Array, ""], buffer: Buffer) -> Buffer:
        return jax.lax.switch(distance - 1, branches, buffer)

    return by_shard(layout, run, (layout.spec(), buffers), buffers)


def _in_mesh_order(layout: Layout) -> tuple[Axes, list[int]]:
    """The DP axes, and the number that `ppermute` gives each replica, int[replicas].

    `ppermute` numbers devices in the order of the mesh, whatever the order of its axes argument.
    """
    axes = tuple(axis for axis in layout.mesh.axis_names if axis in layout.dp_axes)
    order = np.arange(layout.split.dp).reshape([layout.size((axis,)) for axis in layout.dp_axes])
    order = order.transpose([layout.dp_axes.index(axis) for axis in axes])
    return axes, np.argsort(order.reshape(-1)).tolist()


def view(source: Layout, target: Layout) -> Callable[[Pool], Pool]:
    """Returns the program that views the memory of the source's pools as pools of the target.

    Nothing is copied or sent. A page whose KV heads the target splits over f devices becomes f
    pages. Donate the pool.
    """

    def run(pool: Pool) -> Pool:
        def one(x: Array) -> Array:
            seen = _seen_by(source, target, x)
            # Without a write, XLA:CPU copies the pool if pages are left with one head.
            null_page = seen[NULL_PAGE : NULL_PAGE + 1]
            return jax.lax.dynamic_update_slice(seen, null_page, (NULL_PAGE, 0, 0, 0))

        return jax.tree.map(one, pool)

    return by_shard(source, run, source.spec(*KV_AXES), target.spec(*KV_AXES))


def _seen_by(holder: Layout, other: Layout, x: Array) -> Array:
    """Views a device's pages of one layout as those of another: the same bytes in order."""
    heads = x.shape[1] * holder.size(holder.kv_axes) // other.size(other.kv_axes)
    return jnp.reshape(x, (-1, heads, *x.shape[2:]))


def pack(source: Layout, target: Layout) -> Callable[[Pool, Array], Buffer]:
    """Returns the program that packs the source's pages `pages[i]` of each replica into a buffer.

    The program takes a pool of the target, as `view` returns it."""

    def run(pool: Pool, pages: Int[Array, " pages"]) -> Buffer:
        seen = [_seen_by(target, source, x) for x in jax.tree.leaves(pool)]
        arrays = [jnp.take(x, pages, axis=0, mode="clip") for x in seen]
        return jnp.stack(arrays, axis=2)

    taken = target.spec(*KV_AXES), source.spec("batch")
    return by_shard(source, run, taken, source.spec(*PAGE_AXES))


def unpack(layout: Layout) -> Callable[[Pool, Buffer, Array], Pool]:
    """Returns the program that writes a buffer to the pages `pages[i]` of each replica.

    A page for NULL_PAGE is dropped. Donate the pool.
    """

    def run(pool: Pool, buffer: Buffer, pages: Int[Array, " pages"]) -> Pool:
        leaves, tree = jax.tree.flatten(pool)
        written = [put(x, buffer[:, :, i], pages) for i, x in enumerate(leaves)]
        return jax.tree.unflatten(tree, written)

    pool = layout.spec(*KV_AXES)
    taken = pool, layout.spec(*PAGE_AXES), layout.spec("batch")
    return by_shard(layout, run, taken, pool)


def put(pool: Array, new: Array, pages: Int[Array, " pages"]) -> Array:
    """Returns the pool with `new[i]` in page `pages[i]`; entries for NULL_PAGE are dropped."""
    # NULL_PAGE may not be written: the memory of a narrow one holds wide pages that may be in use.
    return jax.lax.platform_dependent(pool, new, pages, cpu=put_in_turn, default=put_at_once)


def put_in_turn(pool: Array, new: Array, pages: Array) -> Array:
    """Writes one page after the other: XLA:CPU may copy the whole pool for a scatter."""

    def write(slot: Int[Array, ""], pool: Array) -> Array:
        old = jax.lax.dynamic_index_in_dim(pool, pages[slot])
        kept = jnp.where(pages[slot] == NULL_PAGE, old, jax.lax.dynamic_index_in_dim(new, slot))
        return jax.lax.dynamic_update_slice(pool, kept, (pages[slot], 0, 0, 0))

    return jax.lax.fori_loop(0, len(pages), write, pool)


def put_at_once(pool: Array, new: Array, pages: Array) -> Array:
    dropped = jnp.where(pages == NULL_PAGE, pool.shape[0], pages)
    return pool.at[dropped].set(new, mode="drop")
