"""What bursts with drafts take of a device, beside weights and KV cache.

Knows shapes. Does not know whether that fits.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp

from pat_jax.engine.device.draft.draft_specs import DraftSpecs
from pat_jax.engine.sequences.state import abstract_drafting
from pat_jax.layout.buckets import NO_DRAFTS, Buckets, Drafts
from pat_jax.layout.layout import Layout, shard_bytes
from pat_jax.models.config import ModelConfig
from pat_jax.models.policy import Policy
from pat_jax.planning.types import Split

# Arrays of the size of a line's logits, in float32, that sampling keeps at a time in compiled programs: 5 on a
# CPU, 4.0 to 4.3 for an H100, 5.6 to 6.6 for a TPU v5e (the vocabulary of Qwen3, 32 rows, budgets of 3 and 7).
LOGITS = 6
FLOAT = 4  # bytes
SCORES = 2  # of attention, as large and in float32, where no kernel keeps them to itself


class Paged(Protocol):
    @property
    def page_size(self) -> int: ...

    @property
    def prefill_blocks(self) -> int: ...


class DraftBytes(NamedTuple):
    """Bytes of drafts on a device."""

    source: int = 0  # texts, a draft model with its cache, or the head of the policy's first layers
    steps: int = 0  # temporaries: the logits of all tokens of a line, and what is made of them


@dataclass(frozen=True)
class Drafter:
    """Which drafts bursts may verify, and the model that says them, where one does."""

    drafts: Drafts = NO_DRAFTS
    policy: Policy | None = None

    @property
    def come_from(self) -> str:
        return self.drafts.come_from(self.policy and self.policy.config)


def draft_bytes(
    model: ModelConfig,
    layouts: Mapping[Split, Layout],
    buckets: Buckets,
    config: Paged,
    drafter: Drafter,
    dtype: jnp.dtype,
) -> dict[Split, DraftBytes]:
    """Bytes of drafts in each layout, by its largest program; empty where there are none.

    Args:
      model: that verifies.
    """
    drafts = drafter.drafts
    of_model = drafter.policy and DraftSpecs(
        drafter.policy, dtype, buckets, drafts, config.page_size, config.prefill_blocks
    )

    def most(layout: Layout) -> DraftBytes:
        sizes = [(n, m) for n in buckets.rows[layout.split] for m in drafts.of(n)]
        fixed = 0  # whole on every device, whether bursts of this layout draft or not
        if drafts.exit_layer:
            fixed = model.embed_dim**2 * jnp.dtype(dtype).itemsize
        if of_model:
            fixed = _bytes(of_model.params(layout))
        if sizes and of_model:
            fixed += _bytes(of_model.pool(layout))
        length = -(-buckets.lengths[-1] // config.page_size) * config.page_size
        found = []
        for rows, budget in sizes:
            steps = _of_steps(model, layout, (rows, budget, length), drafts, dtype)
            found.append(DraftBytes(fixed + _of_texts(layout, rows, length, drafts), steps))
        return max(found, key=sum, default=DraftBytes(fixed))

    return {split: most(layout) for split, layout in layouts.items()}


def _of_texts(layout: Layout, rows: int, length: int, drafts: Drafts) -> int:
    if drafts.is_said:
        return 0
    room = drafts.text_room(length, length)  # the longest context
    return _bytes(abstract_drafting(layout, rows, length, drafts.longest, room))


def _of_steps(
    model: ModelConfig,
    layout: Layout,
    shape: tuple[int, int, int],
    drafts: Drafts,
    dtype: jnp.dtype,
) -> int:
    """
    Args:
      shape: rows of a group, budget, tokens of a row.
    """
    rows, budget, length = shape
    # Whole on every device of a group: each draws the same tokens.
    steps = LOGITS * FLOAT * rows * (1 + budget) * model.padded_vocab_size
    if layout.backend.cache == "copy":
        turns = 1 + drafts.draft(budget)
        heads = model.padded_num_heads // layout.split.tp
        scores = SCORES * FLOAT * rows * turns * heads * (length + turns)
        # Of a step attention comes first, and leaves its memory to sampling.
        steps = max(steps, scores) + _turns(model, layout, rows, turns, dtype)
    return steps


def _bytes(tree: Any) -> int:
    return sum(map(shard_bytes, jax.tree.leaves(tree)))


def _turns(model: ModelConfig, layout: Layout, rows: int, turns: int, dtype: jnp.dtype) -> int:
    """Of copies of the cache, the columns behind each row's own: see `DraftCopy.begin`."""
    heads = model.num_kv_heads // layout.size(layout.kv_axes)
    columns = 2 * model.num_layers * rows * heads * turns
    return columns * model.head_dim * jnp.dtype(dtype).itemsize
