"""The device memory that bursts with drafts need in addition to weights and KV cache.

Knows shapes. Does not know how much memory a device has.
"""

from collections.abc import Mapping

import jax.numpy as jnp

from pat_jax.engine.device.draft.drafter import Drafter, DraftShapes
from pat_jax.engine.sequences.page_allocator import num_pages_for
from pat_jax.layout.buckets import Drafts
from pat_jax.layout.layout import Layout, shard_bytes
from pat_jax.planning.memory import DraftBytes
from pat_jax.planning.types import Split

# Float32 arrays, each as large as all logits of a step, that sampling holds at a time in compiled
# programs: 5 on a CPU, 4.0 to 4.3 for an H100, 5.6 to 6.6 for a TPU v5e (the vocabulary of Qwen3,
# 32 rows, 3 and 7 draft tokens).
LOGITS = 6
FLOAT = 4  # bytes
SCORES = 2  # float32 arrays of attention scores held at a time, if no kernel computes attention


def draft_bytes(
    layouts: Mapping[Split, Layout], shapes: DraftShapes, drafter: Drafter
) -> dict[Split, DraftBytes]:
    """Returns the bytes that drafts need in each layout: those of the program that needs most."""
    drafts = drafter.drafts
    buckets = shapes.buckets
    size = shapes.page_size

    def most(layout: Layout) -> DraftBytes:
        # Every device has all weights of the drafter, even if this layout makes no drafts.
        fixed = shard_bytes(drafter.params(layout, shapes))
        longest = buckets.lengths[-1]
        found = [DraftBytes(fixed)]
        length = num_pages_for(longest, size) * size
        for rows in buckets.rows[layout.split]:
            for num_draft_tokens in drafts.of(rows):
                source = fixed + shard_bytes(drafter.state(layout, rows, longest, shapes))
                steps = _of_steps(shapes, layout, (rows, num_draft_tokens, length), drafts)
                found.append(DraftBytes(source, steps))
        return max(found, key=sum)

    return {split: most(layout) for split, layout in layouts.items()}


def _of_steps(
    shapes: DraftShapes, layout: Layout, shape: tuple[int, int, int], drafts: Drafts
) -> int:
    """Bytes of a step's temporaries. `shape` is rows per replica, draft tokens, tokens of a row."""
    rows, num_draft_tokens, length = shape
    model = shapes.model
    # Logits are whole on every device of a replica: each samples the same tokens.
    steps = LOGITS * FLOAT * rows * (1 + num_draft_tokens) * model.padded_vocab_size
    if layout.backend.cache == "copy":
        turns = 1 + drafts.draft(num_draft_tokens)
        heads = model.padded_num_heads // layout.split.tp
        scores = SCORES * FLOAT * rows * turns * heads * (length + turns)
        # Columns for drafts in the copies of the cache, see `DraftCopy.begin`.
        kv_heads = model.num_kv_heads // layout.size(layout.kv_axes)
        columns = 2 * model.num_layers * rows * kv_heads * turns * model.head_dim
        # Attention and sampling do not run at the same time, so the larger counts.
        steps = max(steps, scores) + columns * jnp.dtype(shapes.dtype).itemsize
    return steps
