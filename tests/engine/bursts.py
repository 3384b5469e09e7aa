"""A burst without devices: what they would have said is given."""

import numpy as np

from pat_jax.engine.sequences.sequence_table import SequenceTable
from pat_jax.engine.sequences.state import BurstOutput


def burst_output(
    tokens: np.ndarray, logprobs: np.ndarray, emitted: np.ndarray, live: np.ndarray
) -> BurstOutput:
    """The likeliest tokens are made up from those sampled, three of each."""
    top = tokens[:, :, None] + np.arange(3)[None, None, :]
    steps = np.int32(tokens.shape[1])
    none_drawn = np.zeros((len(tokens), 1), np.int32)
    return BurstOutput(
        tokens,
        logprobs,
        2 * logprobs,
        emitted,
        live,
        steps,
        top,
        -top.astype(np.float32),
        none_drawn,
    )


def burst(
    table: SequenceTable,
    emitted: np.ndarray,
    goes_on: np.ndarray,
    tokens: np.ndarray | int = 1,
    steps: int = 4,
) -> None:
    """Each live sequence says one token `emitted` times; int[live], bool[live], int[live]."""
    rows, live = table.num_groups * table.rows_per_group, table.row[table.live]
    said, is_live = np.zeros(rows, np.int32), np.zeros(rows, bool)
    all_tokens = np.zeros((rows, steps), np.int32)
    said[live], is_live[live] = emitted, goes_on
    all_tokens[live] = np.broadcast_to(tokens, len(live))[:, None]
    output = burst_output(all_tokens, -all_tokens.astype(np.float32), said, is_live)
    table.retire(output)
