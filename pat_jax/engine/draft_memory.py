"""What bursts with drafts take of a device, beside weights and KV cache.

Knows shapes. Does not know whether that fits.
"""

from collections.abc import Mapping
from typing import NamedTuple

import jax.numpy as jnp

from pat_jax.engine.layout.buckets import Buckets, Drafts
from pat_jax.engine.layout.layout import Layout, shard_bytes
from pat_jax.engine.sequences.state import abstract_text
from pat_jax.models.config import ModelConfig
from pat_jax.planning.types import Split

# Arrays of the size of a line's logits, in float32, that sampling keeps at a time in compiled programs: 5 on a
# CPU, 4.0 to 4.3 for an H100, 5.6 to 6.6 for a TPU v5e (the vocabulary of Qwen3, 32 rows, budgets of 3 and 7).
LOGITS = 6
FLOAT = 4  # bytes
SCORES = 2  # of attention, as large and in float32, where no kernel keeps them to itself


class DraftBytes(NamedTuple):
    """Of a device."""

    texts: int = 0  # that rows draft from
    steps: int = 0  # temporaries: the logits of all tokens of a line, and what is made of them


def draft_bytes(
    model: ModelConfig,
    layouts: Mapping[Split, Layout],
    buckets: Buckets,
    page_size: int,
    drafts: Drafts,
    dtype: jnp.dtype,
) -> dict[Split, DraftBytes]:
    """Of each layout, what that of its programs takes that takes most; nothing where there are none."""
    length = -(-buckets.lengths[-1] // page_size) * page_size

    def most(layout: Layout) -> DraftBytes:
        rows = buckets.rows[layout.split]
        found = [
            _of_program(model, layout, n, budget, length, drafts, dtype)
            for n in rows
            for budget in drafts.of(n)
        ]
        return max(found, key=sum, default=DraftBytes())

    return {split: most(layout) for split, layout in layouts.items()}


def _of_program(
    model: ModelConfig,
    layout: Layout,
    rows: int,
    budget: int,
    length: int,
    drafts: Drafts,
    dtype: jnp.dtype,
) -> DraftBytes:
    texts = shard_bytes(abstract_text(layout, rows, length, drafts.longest, drafts.texts))
    # Whole on every device of a group: each draws the same tokens.
    steps = LOGITS * FLOAT * rows * (1 + budget) * model.padded_vocab_size
    if layout.backend.cache == "copy":
        turns = 1 + drafts.longest
        heads = model.num_heads // layout.split.tp
        scores = SCORES * FLOAT * rows * turns * heads * (length + turns)
        # Of a step attention comes first, and leaves its memory to sampling.
        steps = max(steps, scores) + _turns(model, layout, rows, turns, dtype)
    return DraftBytes(texts, steps)


def _turns(model: ModelConfig, layout: Layout, rows: int, turns: int, dtype: jnp.dtype) -> int:
    """Of copies of the cache, the columns behind each row's own: see `DraftCopy.begin`."""
    heads = model.num_kv_heads // layout.size(layout.kv_axes)
    columns = 2 * model.num_layers * rows * heads * turns
    return columns * model.head_dim * jnp.dtype(dtype).itemsize
