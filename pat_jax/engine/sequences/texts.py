"""The texts that live sequences draft from, laid out for the devices: see `device/suffix.py`.

All on the host, in NumPy. A burst drafts from what others had said when it was launched, and from what
its own rows say on the way.
"""

from collections.abc import Iterable

import numpy as np

from pat_jax.engine.sequences.responses import Responses
from pat_jax.engine.sequences.types import NO_TOKEN

LEAD = 16  # tokens of the prompt before a response: what its beginning is found by


def texts(responses: Responses, room: int, own: int) -> np.ndarray:
    """Of every row, int32[rows, room + own]: first texts of its prompt's other samples, then its own.

    Of equally long matches the last counts, so the best come last: those that have ended, behind those
    that have not. Texts that find no room are left out, and the beginning of one that finds too little.

    Args:
      room: columns for others.
      own: columns for a row's own tokens, from its first on.
    """
    table = responses.table
    rows = table.num_groups * table.rows_per_group
    laid_out = np.full((rows, room + own), NO_TOKEN, np.int32)
    shared: dict[int, np.ndarray] = {}
    for i in table.live.tolist():
        prompt, row = int(responses.prompt[i]), table.row[i]
        if prompt not in shared:
            shared[prompt] = _packed(_of_prompt(responses, prompt), room)
        laid_out[row, :room] = shared[prompt]
        known = responses.known(i)
        laid_out[row, room : room + len(known)] = known
    return laid_out


def _of_prompt(responses: Responses, prompt: int) -> Iterable[np.ndarray]:
    """What the samples of a prompt have said, the best to draft from first; of one alone nothing."""
    table, samples = responses.table, responses.samples(prompt)
    if len(samples) < 2:
        return
    order = np.lexsort((-table.length[samples], ~table.is_done[samples]))
    for i in samples[order].tolist():
        lead = max(0, int(table.prompt_length[i]) - LEAD)
        if table.length[i] > table.prompt_length[i]:
            yield responses.known(i)[lead:]


def _packed(found: Iterable[np.ndarray], room: int) -> np.ndarray:
    """From the last column backwards, NO_TOKEN behind each."""
    packed = np.full(room, NO_TOKEN, np.int32)
    stop = room - 1
    for text in found:
        if stop <= 0:
            break
        kept = text[-stop:]
        packed[stop - len(kept) : stop] = kept
        stop -= len(kept) + 1
    return packed
