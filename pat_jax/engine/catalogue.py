"""Which programs a rollout needs: every function, for every layout and bucket it can meet."""

import math
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp

from pat_jax.engine import decode, pages, switch
from pat_jax.engine.buckets import Buckets
from pat_jax.engine.decode import DecodeFunctions
from pat_jax.engine.layout import Layout, shard_bytes
from pat_jax.engine.pages import PAGE_AXES, Exchange
from pat_jax.engine.programs import Key, ProgramTable
from pat_jax.engine.rounds import SIZES
from pat_jax.engine.state import (
    DecodeState,
    Until,
    abstract_cache,
    abstract_rows,
    abstract_seen,
)
from pat_jax.models.kv_cache import KV_AXES, KVCache
from pat_jax.models.policy import Params
from pat_jax.planning.types import Split
from pat_jax.pytree import with_sharding

PAGE_COLUMNS = 64  # tokens; few enough that a half-empty last page of a sequence is little
RESLICE_CHUNK_BYTES = 512 * 2**20  # of whole float32 leaves; bounds the extra memory of a switch


@dataclass(frozen=True)
class Reslice:
    """How the weights go from one layout to another."""

    runs: list[list[int]]  # chunks of the leaves that the two hold differently; others stay
    is_on_host: bool  # leaf by leaf in the host's memory, by no program
    sent_bytes: int  # between devices, all of them together
    extra_bytes: int  # of one device, at most, besides its old shards


@dataclass(frozen=True)
class Catalogue:
    functions: DecodeFunctions
    layouts: dict[Split, Layout]
    buckets: Buckets
    prefill_rows: int
    prefill_chunk: int
    reslice_chunk_bytes: int = RESLICE_CHUNK_BYTES
    gathers_on_host: bool = False  # weights, when TP falls: best where devices share its memory
    _reslices: dict[tuple[Split, Split], Reslice] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    def declare(self, table: ProgramTable) -> None:
        for layout in self.layouts.values():
            self._declare_decode(table, layout)
            self._declare_moves(table, layout)
            for target in self.layouts.values():
                if target is not layout:
                    self._declare_switch(table, layout, target)

    def params(self, layout: Layout) -> Params:
        policy = self.functions.policy
        return with_sharding(policy.abstract(self.functions.dtype), layout.param_shardings(policy))

    def cache(self, layout: Layout, rows: int, length: int) -> KVCache:
        functions = self.functions
        return abstract_cache(functions.policy.config, layout, rows, length, functions.dtype)

    def chunk(self, length: int) -> int:
        """Tokens of one prefill call: they must divide the cache, or the last call would overshoot."""
        return math.gcd(self.prefill_chunk, length)

    @property
    def page_columns(self) -> int:
        """Tokens of a page; whole pages fill a cache of any length bucket."""
        common = math.gcd(*self.buckets.lengths)
        return max(n for n in range(1, PAGE_COLUMNS + 1) if common % n == 0)

    def _declare_decode(self, table: ProgramTable, layout: Layout) -> None:
        split, params = layout.split, self.params(layout)
        scalar: Any = jax.ShapeDtypeStruct((), jnp.int32, sharding=layout.sharding())
        for length in self.buckets.lengths:
            for rows in self.buckets.rows[split]:
                cache = self.cache(layout, rows, length)
                seen = abstract_seen(self.functions.policy.config, layout, rows)
                state = DecodeState(abstract_rows(layout, rows), seen, cache)
                key = Key("decode", split, rows, length)
                until = Until(scalar, scalar)
                table.declare(
                    key, self.functions.burst(layout), params, state, until, donate_argnums=1
                )
                self._declare_allocate(table, layout, rows, length)
                picks = self._row_index(layout, self.prefill_rows)
                few = self.cache(layout, self.prefill_rows, length)
                insert = decode.insert_rows(layout)
                table.declare(
                    Key("insert", split, rows, length), insert, cache, few, picks, donate_argnums=0
                )
                self._declare_pages(table, layout, rows, length)
            self._declare_allocate(table, layout, self.prefill_rows, length)
            few = self.cache(layout, self.prefill_rows, length)
            shape = (self.prefill_rows * split.dp, self.chunk(length))
            tokens = jax.ShapeDtypeStruct(shape, jnp.int32, sharding=layout.sharding("batch"))
            prefill = self.functions.prefill(layout)
            table.declare(
                Key("prefill", split, 0, length),
                prefill,
                params,
                few,
                tokens,
                scalar,
                donate_argnums=1,
            )

    def _declare_pages(self, table: ProgramTable, layout: Layout, rows: int, length: int) -> None:
        cache, columns = self.cache(layout, rows, length), self.page_columns
        for size in SIZES if len(self.layouts) > 1 else ():
            picks, key = self._row_index(layout, size), Key("pack", layout.split, rows, length)
            key = key._replace(to_rows=size)
            table.declare(key, pages.pack(layout, columns), cache, picks, picks)
            table.declare(
                key._replace(name="unpack"),
                pages.unpack(layout, columns),
                cache,
                self.buffer(layout, size),
                picks,
                picks,
                donate_argnums=0,
            )

    def buffer(self, layout: Layout, size: int) -> jax.ShapeDtypeStruct:
        """Staged pages of each group."""
        config = self.functions.policy.config
        shape = (size * layout.split.dp, config.num_kv_heads, 2 * config.num_layers)
        return jax.ShapeDtypeStruct(
            (*shape, self.page_columns, config.head_dim),
            self.functions.dtype,
            sharding=layout.sharding(*PAGE_AXES),
        )

    def _declare_allocate(
        self, table: ProgramTable, layout: Layout, rows: int, length: int
    ) -> None:
        shape = self.cache(layout, rows, length)
        table.declare(
            Key("allocate", layout.split, rows, length),
            lambda: jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shape),
            out_shardings=layout.sharding(*KV_AXES),
        )

    def _declare_moves(self, table: ProgramTable, layout: Layout) -> None:
        split = layout.split
        for length in self.buckets.lengths:
            for rows, to_rows in self.buckets.row_steps(split):
                self._declare_resize(table, layout, rows, length, to_rows, length)
        for length, to_length in zip(self.buckets.lengths, self.buckets.lengths[1:], strict=False):
            for rows in self.buckets.rows[split]:
                self._declare_resize(table, layout, rows, length, rows, to_length)

    def _declare_resize(
        self,
        table: ProgramTable,
        layout: Layout,
        rows: int,
        length: int,
        to_rows: int,
        to_length: int,
    ) -> None:
        key = Key("resize", layout.split, rows, length, to_rows=to_rows, to_length=to_length)
        cache, picks = self.cache(layout, rows, length), self._row_index(layout, to_rows)
        table.declare(key, decode.resize(layout, to_length), cache, picks)

    def _row_index(self, layout: Layout, rows: int) -> jax.ShapeDtypeStruct:
        shape = (rows * layout.split.dp,)
        return jax.ShapeDtypeStruct(shape, jnp.int32, sharding=layout.sharding("batch"))

    def _declare_switch(self, table: ProgramTable, source: Layout, target: Layout) -> None:
        exchange = Exchange.between(source, target)
        for size in SIZES:
            packed = self.buffer(source, size)
            down = 1 if exchange.is_up else exchange.members.shape[1]
            key = Key("exchange", source.split, size, target=target.split)
            table.declare(key, exchange.all(), (packed,) * down)
            for group in range(exchange.narrow.split.dp):
                table.declare(key._replace(part=1 + group), exchange.one(group), (packed,))
        if not self.reslice(source, target).is_on_host:
            self.declare_reslice(table, source, target)

    def declare_reslice(self, table: ProgramTable, source: Layout, target: Layout) -> None:
        leaves = jax.tree.leaves(self.params(source))
        out = [x.sharding for x in jax.tree.leaves(self.params(target))]
        for part, run in enumerate(self.reslice(source, target).runs):
            table.declare(
                Key("reslice", source.split, target=target.split, part=part),
                lambda leaves: leaves,
                [leaves[i] for i in run],
                out_shardings=[out[i] for i in run],
            )

    def reslice(self, source: Layout, target: Layout) -> Reslice:
        """Looked at leaf by leaf once for each pair: a switch asks for it again."""
        pair = source.split, target.split
        if pair not in self._reslices:
            self._reslices[pair] = self._reslice(source, target)
        return self._reslices[pair]

    def _reslice(self, source: Layout, target: Layout) -> Reslice:
        before, after = (jax.tree.leaves(self.params(layout)) for layout in (source, target))
        moving = [
            i
            for i, (a, b) in enumerate(zip(before, after, strict=True))
            if a.sharding != b.sharding
        ]
        whole = [x.size * x.dtype.itemsize for x in before]
        held, needed = ([shard_bytes(x) for x in leaves] for leaves in (before, after))
        extra = list(needed)
        is_on_host = self.gathers_on_host and target.split.tp < source.split.tp
        if is_on_host:
            # Leaf by leaf, put together on the host: the memory of one serves the next, where that
            # of a large chunk would be faulted in anew (seen: half of the time).
            runs = [[i] for i in moving]
            extra = [n + w // source.mesh.size for n, w in zip(needed, whole, strict=True)]
        else:
            runs = switch.chunks(moving, whole, self.reslice_chunk_bytes)
        return Reslice(
            runs,
            is_on_host,
            sent_bytes=sum(max(needed[i] - held[i], 0) for i in moving) * source.mesh.size,
            extra_bytes=max((sum(extra[i] for i in run) for run in runs), default=0),
        )
