"""Which programs a rollout needs: every function, for every layout and bucket it can meet."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import permutations
from typing import Any

import jax
import jax.numpy as jnp

from pat_jax.common.errors import UserError
from pat_jax.common.pytree import with_sharding
from pat_jax.engine.device.decode import decode
from pat_jax.engine.device.decode.decode import DecodeFunctions
from pat_jax.engine.device.draft.draft_specs import DraftSpecs
from pat_jax.engine.device.pages import pages
from pat_jax.engine.device.pages import reshard as switch
from pat_jax.engine.device.pages.pages import PAGE_AXES, Exchange
from pat_jax.engine.relocation.rounds import SHIFT_SIZES, SIZES
from pat_jax.engine.sequences.page_allocator import num_pages_for
from pat_jax.engine.sequences.state import (
    DecodeState,
    Pool,
    ReservedPages,
    Until,
    abstract_drafting,
    abstract_pool,
    abstract_reach,
    abstract_rows,
    abstract_seen,
)
from pat_jax.layout.buckets import Buckets, Drafts, Shapes
from pat_jax.layout.layout import Layout, shard_bytes
from pat_jax.models.cache.kv_cache import KV_AXES
from pat_jax.models.cache.paged_layer import reads_what_rows_hold
from pat_jax.models.config import ModelConfig
from pat_jax.models.policy import Params
from pat_jax.planning.types import Reads, Split
from pat_jax.programs.programs import Key, ProgramTable

COPIES = 64  # pages of a group that one program copies
SMALLER = 8  # a small prefill call than a large one: on accelerators about one read of the weights
RESLICE_CHUNK_BYTES = 512 * 2**20  # of whole float32 leaves; bounds the extra memory of a switch


@dataclass(frozen=True)
class Reslice:
    """How the weights go from one layout to another."""

    runs: list[list[int]]  # chunks of the leaves that the two hold differently; others stay
    is_on_host: bool  # leaf by leaf in the host's memory, by no program
    sent_bytes: int  # between devices, all of them together
    extra_bytes: int  # of one device, at most, besides its old shards


@dataclass(frozen=True)
class ProgramSpecs:
    functions: DecodeFunctions
    layouts: dict[Split, Layout]
    buckets: Buckets
    page_size: int  # tokens
    pages: dict[Split, int]  # of one group, NULL_PAGE among them
    prefill_blocks: int  # pages of a group that a large prefill call computes
    reslice_chunk_bytes: int = RESLICE_CHUNK_BYTES
    draft_specs: DraftSpecs | None = None  # of a draft model
    first: Buckets | None = None  # whose bursts are compiled and measured first; None: all are
    _reslices: dict[tuple[Split, Split], Reslice] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )
    _params: dict[Split, Params] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    @property
    def drafts(self) -> Drafts:
        return self.functions.drafts

    @property
    def drafts_from(self) -> str:
        draft = self.functions.draft_policy
        return self.drafts.come_from(draft and draft.config)

    @property
    def measured(self) -> Buckets:
        """Those that a warm-up measures."""
        return self.first or self.buckets

    def is_first(self, key: Key) -> bool:
        """Whether a program is compiled before the first rollout; others are when they are needed."""
        if self.first is None or not key.length:
            return True
        has_rows = key.name != "decode" or key.rows in self.first.rows[key.split]
        return has_rows and key.length in self.first.lengths

    @property
    def shapes(self) -> Shapes:
        functions = self.functions
        steps = functions.burst_steps, functions.check_every
        return Shapes(self.buckets, self.pages, self.page_size, *steps, self.drafts)

    def declare(self, table: ProgramTable) -> None:
        for layout in self.layouts.values():
            self._declare_decode(table, layout)
            self._declare_pages(table, layout)
            if self.draft_specs:
                self.draft_specs.declare(table, layout)
            for target in self.layouts.values():
                if target is not layout:
                    self._declare_switch(table, layout, target)

    def params(self, layout: Layout) -> Params:
        if (split := layout.split) not in self._params:  # many programs take them
            policy, shardings = self.functions.policy, layout.param_shardings
            abstract = policy.abstract(self.functions.dtype)
            self._params[split] = with_sharding(abstract, shardings(policy))
        return self._params[split]

    def exit_head(self, layout: Layout) -> jax.ShapeDtypeStruct:
        """Whole on every device, as the activations that it is multiplied by are."""
        embed = self.functions.policy.config.embed_dim
        dtype, whole = self.functions.dtype, layout.sharding()
        return jax.ShapeDtypeStruct((embed, embed), dtype, sharding=whole)

    def pool(self, layout: Layout) -> Pool:
        functions, pages = self.functions, self.pages[layout.split]
        return abstract_pool(
            functions.policy.config, layout, pages, self.page_size, functions.dtype
        )

    @property
    def reads(self) -> Reads:
        """What decode steps read of the KV cache on these devices."""
        layout, config = next(iter(self.layouts.values())), self.functions.policy.config
        is_held = reads_what_rows_hold(layout.kernels, self.page_size, config.head_dim)
        return "held" if is_held else "bucket"

    @property
    def staging_bytes(self) -> int:
        """Most bytes of one device for pages on their way between any two layouts or replicas."""
        layouts = self.layouts.values()
        exchanges = [Exchange.between(a, b) for a, b in permutations(layouts, 2)]
        sizes = [x.most_staged * x.part_bytes(self.pool(x.wide)) for x in exchanges]
        # Packed, and arrived.
        sizes += [2 * pages.part_bytes(x, self.pool(x)) for x in layouts if x.split.dp > 1]
        return SIZES[0] * max(sizes, default=0)

    @property
    def prefill_sizes(self) -> tuple[int, int]:
        """Pages of a group in a large and in a small prefill call."""
        return self.prefill_blocks, max(1, self.prefill_blocks // SMALLER)

    def width(self, length: int) -> int:
        """Pages of a row of `length` tokens."""
        return num_pages_for(length, self.page_size)

    def text_room(self, length: int) -> int:
        """Columns of others' texts that rows of a length bucket draft from."""
        now, most = (self.width(n) * self.page_size for n in (length, self.buckets.lengths[-1]))
        return 0 if self.drafts.is_said else self.drafts.text_room(now, most)

    def _declare_decode(self, table: ProgramTable, layout: Layout) -> None:
        split, params, pool = layout.split, self.params(layout), self.pool(layout)
        for length in self.buckets.lengths:
            for rows in self.buckets.rows[split]:
                for budget in (0, *self.drafts.of(rows)):
                    self._declare_burst(table, layout, rows, length, budget)
            for blocks in set(self.prefill_sizes):
                table.declare(
                    Key("prefill", split, blocks, length),
                    self.functions.prefill(layout),
                    params,
                    pool,
                    self._index(layout, blocks, self.page_size),
                    self._index(layout, blocks),
                    self._index(layout, blocks, self.width(length)),
                    donate_argnums=1,
                )

    def _declare_burst(
        self, table: ProgramTable, layout: Layout, rows: int, length: int, budget: int
    ) -> None:
        scalar: Any = _scalar(layout)
        each: Any = self._index(layout, 1)
        seen = abstract_seen(self.functions.policy.config, layout, rows)
        tables: Any = self._index(layout, rows, self.width(length))
        ring: Any = self._index(layout, 1, self.shapes.reserve_size(rows, budget))
        drafts, drafting, reach = self.drafts, None, None
        if budget and not drafts.is_said:
            size, room = self.width(length) * self.page_size, self.text_room(length)
            drafting = abstract_drafting(layout, rows, size, drafts.longest, room)
            reach = abstract_reach(layout)
        asking, drafter = None, None
        if budget and drafts.exit_layer:
            drafter = self.exit_head(layout)
        if budget and self.draft_specs:
            asking, drafter = self.draft_specs.asking(layout, rows, length)
        table.declare(
            Key("decode", layout.split, rows, length, budget=budget),
            self.functions.burst(layout, budget),
            self.params(layout),
            DecodeState(
                abstract_rows(layout, rows), seen, self.pool(layout), tables, each, drafting, asking
            ),
            ReservedPages(ring, each),
            Until(scalar, scalar, reach),
            drafter,
            donate_argnums=1,
        )

    def _declare_pages(self, table: ProgramTable, layout: Layout) -> None:
        split, pool = layout.split, self.pool(layout)
        table.declare(
            Key("allocate", split),
            lambda: jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), pool),
            out_shardings=layout.sharding(*KV_AXES),
        )
        picks = self._index(layout, COPIES)
        copy = decode.copy_pages(layout)
        table.declare(Key("copy_pages", split), copy, pool, picks, picks, donate_argnums=0)
        moved = SIZES if len(self.layouts) > 1 else ()
        shifted = SHIFT_SIZES if split.dp > 1 else ()
        for size in sorted({*moved, *shifted}):
            picks, buffer = self._index(layout, size), self.buffer(layout, size)
            unpack = pages.unpack(layout)
            table.declare(Key("unpack", split, size), unpack, pool, buffer, picks, donate_argnums=0)
        for size in shifted:
            picks, buffer = self._index(layout, size), self.buffer(layout, size)
            pack = Key("pack", split, size, target=split)
            table.declare(pack, pages.pack(layout, layout), pool, picks)
            table.declare(Key("shift", split, size), pages.shift(layout), _scalar(layout), buffer)

    def buffer(self, layout: Layout, size: int) -> jax.ShapeDtypeStruct:
        """Staged pages of each group."""
        config = self.functions.policy.config
        shape = (size * layout.split.dp, config.num_kv_heads, 2 * config.num_layers)
        return jax.ShapeDtypeStruct(
            (*shape, self.page_size, config.head_dim),
            self.functions.dtype,
            sharding=layout.sharding(*PAGE_AXES),
        )

    @staticmethod
    def _index(layout: Layout, rows: int, *columns: int) -> jax.ShapeDtypeStruct:
        shape = (rows * layout.split.dp, *columns)
        return jax.ShapeDtypeStruct(shape, jnp.int32, sharding=layout.sharding("batch"))

    def _declare_switch(self, table: ProgramTable, source: Layout, target: Layout) -> None:
        exchange = Exchange.between(source, target)
        pair = source, target
        view = Key("view", source.split, target=target.split)
        table.declare(view, pages.view(*pair), self.pool(source), donate_argnums=0)
        for size in SIZES:
            packed, picks = self.buffer(source, size), self._index(source, size)
            pack = Key("pack", source.split, size, target=target.split)
            table.declare(pack, pages.pack(*pair), self.pool(target), picks)
            down = 1 if exchange.is_up else exchange.members.shape[1]
            key = Key("exchange", source.split, size, target=target.split)
            table.declare(key, exchange.all(), (packed,) * down)
            key = key._replace(name="exchange_one")
            table.declare(key, exchange.one(), _scalar(source), (packed,))
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
        is_on_host = source.backend.gathers_on_host and target.split.tp < source.split.tp
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


def pages_per_group(
    layouts: Mapping[Split, Layout],
    buckets: Buckets,
    page_size: int,
    *,
    unsplit: int = 0,
    most: float = math.inf,
) -> dict[Split, int]:
    """Pages of each layout's pools, NULL_PAGE among them.

    A device has the same bytes of them in every layout: one that splits the KV heads in f ways has f
    times as many pages in a group.

    Args:
      unsplit: pages of a group whose KV heads are not split; 0: as many as let every row of every
        layout's largest bucket grow to its full length, but no more than `most`.

    Returns:
      At least what the longest sequence needs alone.

    Raises:
      UserError: `unsplit` is less than that.
    """
    longest = buckets.lengths[-1]
    least = max(unsplit_pages(layout, 1, longest, page_size) for layout in layouts.values())
    if unsplit and unsplit < least:
        raise UserError(
            f"option --rollout.kv_pages is {unsplit}: expected at least {least}, so that a sequence "
            f"of {longest} tokens fits alone in pages of {page_size}."
        )
    full = max(
        unsplit_pages(layout, buckets.rows[split][-1], longest, page_size)
        for split, layout in layouts.items()
    )
    unsplit = unsplit or max(least, int(min(full, most)))
    return {split: unsplit * layout.size(layout.kv_axes) for split, layout in layouts.items()}


def unsplit_pages(layout: Layout, rows: int, length: int, page_size: int) -> int:
    """Pages with all KV heads that are as many bytes of a device as a group of `layout` needs for
    `rows` sequences of `length` tokens and NULL_PAGE."""
    pages = rows * num_pages_for(length, page_size) + 1
    return -(-pages // layout.size(layout.kv_axes))


def page_bytes(config: ModelConfig, page_size: int, dtype: jnp.dtype) -> int:
    """Bytes of one page with all KV heads, in all layers."""
    tokens = 2 * config.num_layers * page_size
    return tokens * config.num_kv_heads * config.head_dim * jnp.dtype(dtype).itemsize


def _scalar(layout: Layout) -> Any:
    return jax.ShapeDtypeStruct((), jnp.int32, sharding=layout.sharding())
