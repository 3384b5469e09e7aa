"""The responses of a run's earlier iterations, to draft from, in memory and in files.

A file is one line with a checksum of all behind it, one of JSON, and the tokens. What cannot be
read costs nothing but itself: drafts change no token. Knows files. Does not know what drafts are.
"""

from collections.abc import Callable, Iterable
from pathlib import Path

import numpy as np

from pat_jax.config.run import RunConfig
from pat_jax.engine.sequences.earlier import EarlierResponses
from pat_jax.engine.sequences.texts import BESIDE
from pat_jax.rl.batches.types import RolloutGroup
from pat_jax.run.checkpoints.side_files import DAMAGED, SideFiles, as_file, of_file
from pat_jax.run.setup import Setup

FOLDER = "earlier_responses"  # in that of the run, with a file for each checkpoint
_WHAT = "earlier responses"
_INTS = np.dtype("<i4")


class EarlierIterations:
    """Those of one run, in `files`. `tokenizer` is a checksum of what token ids stand for, and
    `empty` what they are kept in."""

    def __init__(self, files: SideFiles, tokenizer: int, empty: EarlierResponses):
        self._files, self._tokenizer, self.responses = files, tokenizer, empty

    def put(self, groups: Iterable[RolloutGroup]) -> None:
        """Takes the responses of an iteration that is over; cut ones are as good to copy from."""
        for group in groups:
            self.responses.put(group.prompt.tokens, [one.tokens for one in group.rollouts])

    def save(self, step: int) -> None:
        """Writes them before the checkpoint of `step` is."""
        self._files.write(step, as_bytes(self.responses, self._tokenizer))

    def restore(self, step: int) -> str:
        """Takes those of the checkpoint of `step`. Returns why there are none, in a sentence."""
        return self._files.restore(
            step,
            lambda content: put_bytes(content, self._tokenizer, self.responses),
            "the responses of earlier iterations that drafts are copied from; the run gathers new ones, "
            "and nothing else is lost",
        )


def earlier_iterations(config: RunConfig, setup: Setup) -> EarlierIterations | None:
    """Those of a run that begins; None where nothing would draft from them."""
    text_room, most = setup.engine.text_room, config.speculation.earlier
    if not most or not text_room:
        return None
    of_prompt = min(text_room, _share(config, setup.task.train.num_different))
    empty = EarlierResponses(most, of_prompt, BESIDE)
    files = SideFiles(Path(config.run_dir), FOLDER, "responses of earlier iterations")
    return EarlierIterations(files, setup.task.tokenizer.checksum, empty)


def _share(config: RunConfig, prompts_of_an_epoch: int | None) -> int:
    """Tokens of responses to a prompt, so that all of an epoch have some; one response at the
    least."""
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
    """Brings back the responses of earlier iterations, where `step` of them lie behind the run, and
    says what drafts are copied from."""
    if step and earlier is not None and (lost := earlier.restore(step)):
        notify(lost)
    drafts = setup.engine.specs.drafts
    if drafts.num_draft_tokens and not drafts.is_generated:
        notify(describe_sources(config, earlier and earlier.responses))


def describe_sources(config: RunConfig, earlier: EarlierResponses | None) -> str:
    """What drafts of a run are copied from, and which of that there is none of."""
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
    """A file's content."""
    parts, lengths = [], []
    for prompt, texts in responses:
        parts += [prompt, *texts]
        lengths.append([len(prompt), *map(len, texts)])
    tokens = b"".join(part.astype(_INTS).tobytes() for part in parts)
    return as_file(_WHAT, {"tokenizer": tokenizer, "lengths": lengths}, tokens)


def put_bytes(content: bytes, tokenizer: int, responses: EarlierResponses) -> None:
    """Puts what `as_bytes` has made of others into `responses`. Raises ValueError where the content
    is damaged, or of another tokenizer; nothing has been put."""
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
