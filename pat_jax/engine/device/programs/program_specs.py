"""The programs that a rollout needs: every function, for every layout and bucket it can meet."""

from dataclasses import dataclass
from functools import cached_property
from itertools import permutations
from typing import Any

import jax
import jax.numpy as jnp

from pat_jax.common.pytree import with_sharding
from pat_jax.engine.device.decode.prefill import copy_pages, prefill
from pat_jax.engine.device.draft.drafter import Drafter, DraftShapes
from pat_jax.engine.device.pages import pages
from pat_jax.engine.device.pages.pages import PAGE_AXES, Exchange
from pat_jax.engine.device.pages.reshard import Reshard
from pat_jax.engine.device.programs.decode import DecodeFunctions
from pat_jax.engine.relocation.rounds import SHIFT_SIZES, SIZES
from pat_jax.engine.sequences.page_allocator import num_pages_for
from pat_jax.engine.sequences.state import (
    DecodeState,
    Pool,
    ReservedPages,
    Until,
    abstract_accept_prob,
    abstract_index,
    abstract_pool,
    abstract_routes,
    abstract_rows,
    abstract_seen,
)
from pat_jax.layout.buckets import Buckets, Drafts, Shapes
from pat_jax.layout.layout import Layout
from pat_jax.models.cache.paged_layer import KV_AXES, reads_what_rows_hold
from pat_jax.models.policy import Params
from pat_jax.planning.types import Reads, Split
from pat_jax.programs.programs import Key, ProgramTable

COPIES = 64  # pages of a replica that one program copies
# A large prefill call has this many times the pages of a small one, which on accelerators takes
# about as long as reading the weights once.
SMALLER = 8
RESHARD_CHUNK_BYTES = 512 * 2**20  # over all devices; bounds the extra memory of a switch


@dataclass(frozen=True)
class ProgramSpecs:
    functions: DecodeFunctions
    layouts: dict[Split, Layout]
    buckets: Buckets
    page_size: int  # tokens
    pages: dict[Split, int]  # pages of one replica's pool in each layout, NULL_PAGE included
    prefill_blocks: int  # pages of a replica that a large prefill call computes
    reshard_chunk_bytes: int = RESHARD_CHUNK_BYTES
    first: Buckets | None = None  # buckets compiled before the first rollout; None: all buckets

    @property
    def drafter(self) -> Drafter:
        return self.functions.drafter

    @property
    def drafts(self) -> Drafts:
        return self.drafter.drafts

    @property
    def draft_shapes(self) -> DraftShapes:
        model = self.functions.policy.config
        dtype = self.functions.dtype
        ahead = self.shapes.asked_ahead
        return DraftShapes(model, dtype, self.buckets, self.page_size, self.prefill_blocks, ahead)

    @property
    def measured(self) -> Buckets:
        """The buckets that a warm-up measures."""
        return self.first or self.buckets

    def is_first(self, key: Key) -> bool:
        """Returns whether a program is compiled before the first rollout, or only when needed."""
        if self.first is None or not key.length:
            return True
        has_rows = key.name != "decode" or key.rows in self.first.rows[key.split]
        needed = self.first.lengths[0]
        return has_rows and key.length == self.shapes.length_for(needed, key.num_draft_tokens)

    def measured_drafts(self, split: Split, rows: int, length: int) -> tuple[int, ...]:
        """Returns the numbers of draft tokens with which a warm-up measures bursts of `rows` rows
        per replica and contexts of `length` tokens."""
        programs = {
            n: Key("decode", split, rows, self.shapes.length_for(length, n), num_draft_tokens=n)
            for n in self.drafts.of(rows)
        }
        return tuple(n for n, key in programs.items() if self.is_first(key))

    @property
    def shapes(self) -> Shapes:
        burst_steps = self.functions.burst_steps
        check_every = self.functions.check_every
        return Shapes(
            self.buckets, self.pages, self.page_size, burst_steps, check_every, self.drafts
        )

    def declare(self, table: ProgramTable) -> None:
        for layout in self.layouts.values():
            self._declare_decode(table, layout)
            self._declare_pages(table, layout)
            self.drafter.declare(table, layout, self.draft_shapes)
            for target in self.layouts.values():
                if target is not layout:
                    self._declare_switch(table, layout, target)

    def params(self, layout: Layout) -> Params:
        return self._params[layout.split]

    @cached_property
    def _params(self) -> dict[Split, Params]:
        policy = self.functions.policy
        abstract = policy.abstract(self.functions.dtype)
        return {
            split: with_sharding(abstract, layout.param_shardings(policy))
            for split, layout in self.layouts.items()
        }

    def pool(self, layout: Layout) -> Pool:
        functions = self.functions
        pages = self.pages[layout.split]
        return abstract_pool(
            functions.policy.config, layout, pages, self.page_size, functions.dtype
        )

    @property
    def reads(self) -> Reads:
        """What decode steps read of the KV cache: the pages that rows hold, or the whole bucket."""
        kernels = next(iter(self.layouts.values())).kernels
        head_dim = self.functions.policy.config.head_dim
        is_held = reads_what_rows_hold(kernels, self.page_size, head_dim)
        return "held" if is_held else "bucket"

    @property
    def staging_bytes(self) -> int:
        """The most bytes of a device for buffers of pages, in a switch or between replicas."""
        layouts = self.layouts.values()
        exchanges = [Exchange.between(a, b) for a, b in permutations(layouts, 2)]
        sizes = [x.most_staged * pages.part_bytes(x.wide, self.pool(x.wide)) for x in exchanges]
        # A packed buffer and an arrived one.
        sizes += [2 * pages.part_bytes(x, self.pool(x)) for x in layouts if x.split.dp > 1]
        return SIZES[0] * max(sizes, default=0)

    @property
    def prefill_sizes(self) -> tuple[int, int]:
        """The numbers of pages of a replica in a large and in a small prefill call."""
        return self.prefill_blocks, max(1, self.prefill_blocks // SMALLER)

    def width(self, length: int) -> int:
        """Returns the number of pages of a row with `length` tokens."""
        return num_pages_for(length, self.page_size)

    def _declare_decode(self, table: ProgramTable, layout: Layout) -> None:
        for rows in self.buckets.rows[layout.split]:
            for num_draft_tokens in (0, *self.drafts.of(rows)):
                for length in self.shapes.lengths(num_draft_tokens):
                    self._declare_burst(table, layout, rows, length, num_draft_tokens)
        for length in self.buckets.compiled:
            for blocks in set(self.prefill_sizes):
                table.declare(
                    Key("prefill", layout.split, blocks, length),
                    prefill(self.functions.policy, layout, self.functions.dtype),
                    self.params(layout),
                    self.pool(layout),
                    abstract_index(layout, blocks, self.page_size),
                    abstract_index(layout, blocks),
                    abstract_index(layout, blocks, self.width(length)),
                    abstract_routes(layout, blocks, self.page_size, self.functions.policy.config),
                    donate_argnums=1,
                )

    def _declare_burst(
        self, table: ProgramTable, layout: Layout, rows: int, length: int, num_draft_tokens: int
    ) -> None:
        scalar = _scalar(layout)
        each = abstract_index(layout, 1)
        seen = abstract_seen(self.functions.policy.config, layout, rows)
        tables = abstract_index(layout, rows, self.width(length))
        ring = abstract_index(layout, 1, self.shapes.reserve_size(rows, num_draft_tokens))
        drafting = own_params = accept_prob = None
        if num_draft_tokens:
            drafting = self.drafter.state(layout, rows, length, self.draft_shapes)
            own_params = self.drafter.params(layout, self.draft_shapes)
            accept_prob = None if self.drafts.is_generated else abstract_accept_prob(layout)
        rows_state = abstract_rows(layout, rows)
        table.declare(
            Key("decode", layout.split, rows, length, num_draft_tokens=num_draft_tokens),
            self.functions.burst(layout, num_draft_tokens, drafting),
            self.params(layout),
            DecodeState(rows_state, seen, self.pool(layout), tables, each, drafting),
            ReservedPages(ring, each),
            Until(scalar, scalar, accept_prob),
            own_params,
            donate_argnums=1,
        )

    def _declare_pages(self, table: ProgramTable, layout: Layout) -> None:
        split = layout.split
        pool = self.pool(layout)
        table.declare(
            Key("allocate", split),
            lambda: jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), pool),
            out_shardings=layout.sharding(*KV_AXES),
        )
        picks = abstract_index(layout, COPIES)
        copy = copy_pages(layout)
        table.declare(Key("copy_pages", split), copy, pool, picks, picks, donate_argnums=0)
        moved = SIZES if len(self.layouts) > 1 else ()
        shifted = SHIFT_SIZES if split.dp > 1 else ()
        for size in sorted({*moved, *shifted}):
            picks = abstract_index(layout, size)
            buffer = self.buffer(layout, size)
            unpack = pages.unpack(layout)
            table.declare(Key("unpack", split, size), unpack, pool, buffer, picks, donate_argnums=0)
        for size in shifted:
            picks = abstract_index(layout, size)
            buffer = self.buffer(layout, size)
            pack = Key("pack", split, size, target=split)
            table.declare(pack, pages.pack(layout, layout), pool, picks)
            table.declare(Key("shift", split, size), pages.shift(layout), _scalar(layout), buffer)

    def buffer(self, layout: Layout, size: int) -> jax.ShapeDtypeStruct:
        """Returns the shape of a staging buffer with `size` pages of each replica."""
        config = self.functions.policy.config
        shape = (size * layout.split.dp, config.num_kv_heads, 2 * config.num_layers)
        return jax.ShapeDtypeStruct(
            (*shape, self.page_size, config.head_dim),
            self.functions.dtype,
            sharding=layout.sharding(*PAGE_AXES),
        )

    def _declare_switch(self, table: ProgramTable, source: Layout, target: Layout) -> None:
        exchange = Exchange.between(source, target)
        view = Key("view", source.split, target=target.split)
        table.declare(view, pages.view(source, target), self.pool(source), donate_argnums=0)
        for size in SIZES:
            packed = self.buffer(source, size)
            picks = abstract_index(source, size)
            pack = Key("pack", source.split, size, target=target.split)
            table.declare(pack, pages.pack(source, target), self.pool(target), picks)
            down = 1 if exchange.is_up else exchange.members.shape[1]
            key = Key("exchange", source.split, size, target=target.split)
            table.declare(key, exchange.all(), (packed,) * down)
            key = key._replace(name="exchange_one")
            table.declare(key, exchange.one(), _scalar(source), (packed,))
        if not self.reshard(source, target).is_on_host:
            self.declare_reshard(table, source, target)

    def declare_reshard(self, table: ProgramTable, source: Layout, target: Layout) -> None:
        leaves = jax.tree.leaves(self.params(source))
        out = [x.sharding for x in jax.tree.leaves(self.params(target))]
        plan = self.reshard(source, target)
        for part in sorted(set(plan.parts)):
            run = plan.runs[part]
            table.declare(
                Key("reshard", source.split, target=target.split, part=part),
                lambda leaves: leaves,
                [leaves[i] for i in run],
                out_shardings=[out[i] for i in run],
            )

    def reshard(self, source: Layout, target: Layout) -> Reshard:
        return self._reshards[source.split, target.split]

    @cached_property
    def _reshards(self) -> dict[tuple[Split, Split], Reshard]:
        """By source and target; computed only once, because every switch asks for one."""
        pairs = permutations(self.layouts.values(), 2)
        return {(a.split, b.split): self._reshard(a, b) for a, b in pairs}

    def _reshard(self, source: Layout, target: Layout) -> Reshard:
        return Reshard.between(
            self.params(source),
            self.params(target),
            source.mesh.size,
            self.reshard_chunk_bytes,
            is_on_host=source.backend.gathers_on_host and target.split.tp < source.split.tp,
        )


def _scalar(layout: Layout) -> Any:
    return jax.ShapeDtypeStruct((), jnp.int32, sharding=layout.sharding())
