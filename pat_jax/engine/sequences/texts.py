"""The texts that running sequences draft from, laid out for `device/ngram.py`.

All on the host, in NumPy. A row drafts from what siblings had generated when the burst was
launched, from responses of earlier iterations, and from its own text as it grows.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from pat_jax.engine.sequences.earlier import EarlierResponses
from pat_jax.engine.sequences.responses import Responses
from pat_jax.engine.sequences.sequence_table import NO_TOKEN

LEAD = 16  # tokens of the prompt kept before a response, so that its beginning can be matched
BESIDE = LEAD + 1  # extra columns of a response: its lead and the separator behind it
# If texts are cut, they reach past the longest running sample by the columns of a row's own text
# over this number, because bursts launched behind others use the same texts, too. On real texts an
# eighth and a half give 3 and 1 % fewer tokens per step, all of the columns 4 %
# (`benchmarks/results/draft_acceptance.json`).
AHEAD_PART = 4


class Texts(NamedTuple):
    columns: np.ndarray  # int32[rows, room + own], tokens, see `texts`
    borders: np.ndarray  # int32[rows, 2], first column of earlier responses and the one after them


def texts(
    responses: Responses, room: int, own: int, earlier: EarlierResponses | None = None
) -> Texts:
    """Returns the text of every row: first other texts for its prompt, then its own.

    Among equally long matches the last counts, so the best texts come last: first running samples,
    then responses of earlier iterations, then finished samples. If there is too little room for
    all, texts are cut a little past the length of the longest running sample. If that is not
    enough, the last text that fits loses its beginning, and the others are left out.

    Args:
      room: columns for other texts.
      own: columns for a row's own tokens, from its first on.
      earlier: responses of earlier iterations, if there are any.
    """
    table = responses.table
    rows = table.num_replicas * table.rows_per_replica
    laid_out = Texts(np.full((rows, room + own), NO_TOKEN, np.int32), np.zeros((rows, 2), np.int32))
    shared: dict[int, Texts] = {}
    for i in table.running.tolist():
        prompt = int(responses.prompt[i])
        row = table.row[i]
        if prompt not in shared:
            found = _of_prompt(responses, prompt, earlier)
            if sum(len(text) + 1 for kind in found for text in kind) > room:
                most = _farthest(responses, prompt) + own // AHEAD_PART
                found = [[text[:most] for text in kind] for kind in found]
            shared[prompt] = _packed(found, room)
        laid_out.columns[row, :room], laid_out.borders[row] = shared[prompt]
        known = responses.known(i)
        laid_out.columns[row, room : room + len(known)] = known
    return laid_out


def _of_prompt(
    responses: Responses, prompt: int, earlier: EarlierResponses | None
) -> list[list[np.ndarray]]:
    """Responses with the end of their prompt before them, the best to draft from first: of finished
    samples, of earlier iterations, of running samples."""
    table = responses.table
    samples = responses.samples(prompt)
    length = int(table.prompt_length[samples[0]])
    asked = responses.known(samples[0])[:length]
    if len(samples) < 2:  # its own text is laid out as such
        samples = samples[:0]
    by_length = samples[np.argsort(-table.length[samples], kind="stable")]
    is_done = table.is_done[by_length]

    def behind(ones: np.ndarray) -> Iterator[np.ndarray]:
        for i in ones.tolist():
            if table.length[i] > length:
                yield responses.known(i)[max(0, length - LEAD) :]

    before = earlier.of(asked) if earlier is not None else ()
    whole = [np.concatenate([asked[-LEAD:], text]) for text in before]
    return [list(behind(by_length[is_done])), whole, list(behind(by_length[~is_done]))]


def _farthest(responses: Responses, prompt: int) -> int:
    """The tokens of the longest text that `_of_prompt` returns for an unfinished sample."""
    table = responses.table
    samples = responses.samples(prompt)
    length = int(table.prompt_length[samples[0]])
    going_on = samples[~table.is_done[samples]]
    return int(table.length[going_on].max(initial=length)) - max(0, length - LEAD)


def _packed(found: Sequence[Sequence[np.ndarray]], room: int) -> Texts:
    """Packs the texts of a row from the last column backwards, with NO_TOKEN behind each."""
    packed = np.full(room, NO_TOKEN, np.int32)
    stop = room - 1
    ends = []
    for kind in found:
        for text in kind:
            if stop <= 0:
                break
            kept = text[-stop:]
            packed[stop - len(kept) : stop] = kept
            stop -= len(kept) + 1
        ends.append(max(0, stop + 1))
    return Texts(packed, np.array([ends[1], ends[0]], np.int32))
