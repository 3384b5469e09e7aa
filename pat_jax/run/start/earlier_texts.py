"""Keeps the responses of a run's earlier iterations, to copy drafts from, in memory and in files.

A file has a line with the checksum of the rest, a line of JSON, and the tokens. A run can go on
without it, as drafts change no token. Knows files. Does not know what drafts are.
"""

from collections.abc import Callable, Iterable
from pathlib import Path

import numpy as np

from pat_jax.config.run import RunConfig
from pat_jax.engine.sequences.earlier import EarlierResponses
from pat_jax.engine.sequences.texts import BESIDE
from pat_jax.rl.batches.types import RolloutGroup
from pat_jax.run.checkpoints.side_files import DAMAGED, SideFiles, as_file, of_file
from pat_jax.run.start.setup import Setup

FOLDER = "earlier_responses"  # in the run's folder, with a file for each checkpoint
_WHAT = "earlier responses"
_INTS = np.dtype("<i4")


class EarlierIterations:
    """The earlier responses of one run, saved in `files`. `tokenizer` is a checksum of the meaning
    of token ids; `empty` is the store that `put` fills."""

    def __init__(self, files: SideFiles, tokenizer: int, empty: EarlierResponses):
        self._files, self._tokenizer, self.responses = files, tokenizer, empty

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


def earlier_iterations(config: RunConfig, setup: Setup) -> EarlierIterations | None:
    """Returns an empty store for a run, or None if nothing would draft from it."""
    text_room, most = setup.engine.text_room, config.speculation.earlier
    if not most or not text_room:
        return None
    of_prompt = min(text_room, _share(config, setup.task.train.num_different))
    empty = EarlierResponses(most, of_prompt, BESIDE)
    files = SideFiles(Path(config.run_dir), FOLDER, "responses of earlier iterations")
    return EarlierIterations(files, setup.task.tokenizer.checksum, empty)


def _share(config: RunConfig, prompts_of_an_epoch: int | None) -> int:
    """Returns how many tokens are kept for a prompt: an equal share for each prompt of an epoch,
    and at least one response."""
    rollout, share = config.rollout, config.speculation.earlier
    if prompts_of_an_epoch:
        share //= prompts_of_an_epoch
    return max(share - rollout.max_prompt_length, rollout.max_completion_length + BESIDE)


def recall(
    config: RunConfig,
    setup: Setup,
    earlier: EarlierIterations | None,
    step: int,
    notify: Callable[[str], None],
) -> None:
    """Restores the responses of earlier iterations if the run resumes after `step`. Notifies the
    user of what drafts are copied from."""
    if step and earlier is not None and (lost := earlier.restore(step)):
        notify(lost)
    drafts = setup.engine.specs.drafts
    if drafts.num_draft_tokens and not drafts.is_generated:
        notify(describe_sources(config, earlier and earlier.responses))


def describe_sources(config: RunConfig, earlier: EarlierResponses | None) -> str:
    """Returns a sentence on what drafts of a run are copied from, and what is missing."""
    own, others = "drafts are copied from a response's own text", config.rollout.num_generations - 1
    if not config.speculation.texts:
        return f"{own} alone (--speculation.texts is 0)"
    siblings = f"{others} to its prompt" if others else "none to its prompt (one is sampled)"
    if earlier is None:
        before = "none of earlier iterations (--speculation.earlier is 0)"
    elif not len(earlier):
        before = "none of earlier iterations yet"
    else:
        before = f"{earlier.num_responses:,} of earlier iterations to {len(earlier):,} prompts"
    return f"{own}, and from other responses: {siblings}, {before}"


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
