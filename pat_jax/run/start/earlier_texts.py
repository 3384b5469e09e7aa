"""Keeps responses of earlier iterations, from which drafts are copied, in memory and in files.

A file has a line with the checksum of the rest, a line of JSON, and the tokens. A run can do
without it, as drafts change no token. Knows files. Does not know what drafts are.
"""

from collections.abc import Callable, Iterable
from pathlib import Path

import numpy as np

from pat_jax.config.rollout import RolloutConfig
from pat_jax.engine.sequences.earlier import EarlierResponses
from pat_jax.engine.sequences.texts import BESIDE
from pat_jax.rl.batches.types import RolloutGroup
from pat_jax.run.checkpoints.side_files import DAMAGED, SideFiles, as_file, of_file
from pat_jax.run.start.task import Task

MOST_TOKENS = 2**24  # of responses and their prompts, 4 bytes each
FOLDER = "earlier_responses"  # in the run's folder, with a file for each checkpoint
_WHAT = "earlier responses"
_INTS = np.dtype("<i4")


class EarlierIterations:
    """The earlier responses of one run, saved in `files`. `tokenizer` is a checksum of the meaning
    of token ids; `empty` is the store that `put` fills."""

    def __init__(self, files: SideFiles, tokenizer: int, empty: EarlierResponses):
        self._files = files
        self._tokenizer = tokenizer
        self.responses = empty

    def put(self, groups: Iterable[RolloutGroup]) -> None:
        """Adds the responses of an iteration, truncated ones included."""
        for group in groups:
            self.responses.put(group.prompt.tokens, [one.tokens for one in group.rollouts])

    def save(self, step: int) -> None:
        """Writes the responses, before the checkpoint of `step`."""
        self._files.write(step, as_bytes(self.responses, self._tokenizer))

    def restore(self, step: int) -> str:
        """Restores the responses of the checkpoint of `step`. Returns "", or a sentence on why
        there are none."""
        return self._files.restore(
            step,
            lambda content: put_bytes(content, self._tokenizer, self.responses),
            "the responses of earlier iterations that drafts are copied from; the run gathers new ones, "
            "and nothing else is lost",
        )


def earlier_iterations(
    run_dir: str,
    task: Task,
    rollout: RolloutConfig,
    text_room: int,
    step: int,
    notify: Callable[[str], None],
) -> EarlierIterations:
    """Returns the responses of earlier iterations if the run resumes after `step`, else an empty
    store. Notifies the user of what drafts are copied from.

    Args:
      text_room: most tokens of a prompt's earlier responses that a drafter reads.
    """
    # An equal share for each prompt of an epoch, and at least one response.
    prompts = task.train.num_different
    share = MOST_TOKENS // prompts if prompts else MOST_TOKENS
    one = rollout.max_completion_length + BESIDE
    of_prompt = min(text_room, max(share - rollout.max_prompt_length, one))
    empty = EarlierResponses(MOST_TOKENS, of_prompt, BESIDE)
    files = SideFiles(Path(run_dir), FOLDER, "responses of earlier iterations")
    earlier = EarlierIterations(files, task.tokenizer.checksum, empty)
    if step and (lost := earlier.restore(step)):
        notify(lost)
    own = "drafts are copied from a response's own text"
    others = rollout.num_generations - 1
    siblings = f"{others} to its prompt" if others else "none to its prompt (one is sampled)"
    before = "none of earlier iterations yet"
    if count := len(earlier.responses):
        number = earlier.responses.num_responses
        before = f"{number:,} of earlier iterations to {count:,} prompts"
    notify(f"{own}, and from other responses: {siblings}, {before}")
    return earlier


def as_bytes(responses: EarlierResponses, tokenizer: int) -> bytes:
    """Returns the content of a file with these responses."""
    parts, lengths = [], []
    for prompt, texts in responses:
        parts += [prompt, *texts]
        lengths.append([len(prompt), *map(len, texts)])
    tokens = b"".join(part.astype(_INTS).tobytes() for part in parts)
    return as_file(_WHAT, {"tokenizer": tokenizer, "lengths": lengths}, tokens)


def put_bytes(content: bytes, tokenizer: int, responses: EarlierResponses) -> None:
    """Adds the responses in a file's content to `responses`. Raises ValueError, and adds nothing,
    if the content is damaged or was made with another tokenizer."""
    told, tokens = of_file(_WHAT, content)
    try:
        if told["tokenizer"] != tokenizer:
            raise ValueError("is of another tokenizer than this run's")
        numbers = np.frombuffer(tokens, _INTS)
        each = [length for lengths in told["lengths"] for length in lengths]
        if not all(type(length) is int for length in each):
            raise ValueError(DAMAGED)
        stops = np.cumsum(each, dtype=int)
        parts = iter(np.split(numbers, stops))
        texts_of_prompts = [[next(parts) for _ in lengths] for lengths in told["lengths"]]
        prompts = [prompt for prompt, *_ in texts_of_prompts]
    except (TypeError, KeyError, OverflowError, StopIteration):
        raise ValueError(DAMAGED) from None
    for prompt, (_, *texts) in zip(prompts, texts_of_prompts, strict=True):
        responses.put(prompt, texts)
