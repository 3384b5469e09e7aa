"""Which programs a draft model needs, and what its cache takes.

Every device has all of its weights, in every layout: it is small, and so reads them sooner than two sums a layer
would take. So a switch moves nothing of it.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp

from pat_jax.engine.device.decode.decode import DecodeFunctions
from pat_jax.engine.sequences.page_allocator import num_pages_for
from pat_jax.engine.sequences.state import ModelDrafting, Pool, abstract_pool
from pat_jax.layout.buckets import Buckets, Drafts
from pat_jax.layout.layout import Layout, whole_on_each
from pat_jax.models.cache.kv_cache import KV_AXES
from pat_jax.models.policy import Params, Policy
from pat_jax.planning.types import Split
from pat_jax.programs.programs import Key, ProgramTable


def whole_params(policy: Policy, layout: Layout, dtype: jnp.dtype) -> Params:
    """Shapes with shardings: all of them on every device."""
    whole = layout.sharding()
    return jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=whole), policy.abstract(dtype)
    )


@dataclass(frozen=True)
class DraftSpecs:
    """The programs of a draft model besides bursts."""

    policy: Policy
    dtype: jnp.dtype
    buckets: Buckets
    drafts: Drafts
    page_size: int
    prefill_blocks: int

    def pages(self, split: Split) -> int:
        """Pages of the draft model's cache in a replica."""
        return self.buckets.draft_pages(split, self.drafts, self.page_size)

    def width(self, length: int) -> int:
        return num_pages_for(length, self.page_size)

    def pool(self, layout: Layout) -> Pool:
        config, pages = self.policy.config, self.pages(layout.split)
        return abstract_pool(config, whole_on_each(layout), pages, self.page_size, self.dtype)

    def params(self, layout: Layout) -> Params:
        return whole_params(self.policy, layout, self.dtype)

    @cached_property
    def _functions(self) -> DecodeFunctions:
        return DecodeFunctions(self.policy, self.dtype, (), 1, 1)

    def asking(self, layout: Layout, rows: int, length: int) -> tuple[ModelDrafting, Params]:
        """What a burst is handed, and the weights."""
        tables, each = (self._index(layout, rows, *shape) for shape in ((self.width(length),), ()))
        return ModelDrafting(self.pool(layout), tables, each), self.params(layout)

    def declare(self, table: ProgramTable, layout: Layout) -> None:
        split, pool, own = layout.split, self.pool(layout), whole_on_each(layout)
        table.declare(
            Key("draft_allocate", split),
            lambda: jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), pool),
            out_shardings=own.sharding(*KV_AXES),
        )
        blocks = self.prefill_blocks
        for length in self.buckets.lengths:
            table.declare(
                Key("draft_prefill", split, blocks, length),
                self._functions.prefill(own),
                self.params(layout),
                pool,
                self._index(layout, blocks, self.page_size),
                self._index(layout, blocks),
                self._index(layout, blocks, self.width(length)),
                donate_argnums=1,
            )

    @staticmethod
    def _index(layout: Layout, rows: int, *columns: int) -> Any:
        shape = (rows * layout.split.dp, *columns)
        return jax.ShapeDtypeStruct(shape, jnp.int32, sharding=layout.sharding("batch"))
