"""Keeps responses of earlier iterations, from which drafts are copied, in memory and in files.

A run can do without them, as drafts change no token. Does not know what drafts are.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import numpy as np

from pat_jax.config.rollout import RolloutConfig
from pat_jax.engine.sequences.earlier import EarlierResponses
from pat_jax.engine.sequences.texts import BESIDE
from pat_jax.rl.batches.types import RolloutGroup
from pat_jax.run.checkpoints.side_files import Arrays, SideFiles
from pat_jax.run.start.task import Task

MOST_TOKENS = 2**24  # of responses and their prompts, 4 bytes each
FOLDER = "earlier_responses"  # in the run's folder, with a file for each checkpoint


@dataclass
class EarlierIterations:
    """The earlier responses of one run, saved in `files`. `tokenizer` is a checksum of the meaning
    of token ids; `responses` is the store that `put` fills."""

    files: SideFiles
    tokenizer: int
    responses: EarlierResponses

    def put(self, groups: Iterable[RolloutGroup]) -> None:
        """Adds the responses of an iteration, truncated ones included."""
        for group in groups:
            self.responses.put(group.prompt.tokens, [one.tokens for one in group.rollouts])

    def save(self, step: int) -> None:
        """Writes the responses, before the checkpoint of `step`."""
        self.files.write(step, to_arrays(self.responses, self.tokenizer))

    def restore(self, step: int) -> str:
        """Restores the responses of the checkpoint of `step`. Returns "", or a sentence on why
        there are none."""
        return self.files.restore(
            step,
            lambda arrays: put_arrays(arrays, self.tokenizer, self.responses),
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


def to_arrays(responses: EarlierResponses, tokenizer: int) -> Arrays:
    """Returns the content of a file: of each prompt, its tokens and those of its responses."""
    prompts = [[prompt, *texts] for prompt, texts in responses]
    texts = [text for prompt in prompts for text in prompt]
    return {
        "tokenizer": np.array(tokenizer),
        "texts": np.array([len(prompt) for prompt in prompts], np.int64),
        "lengths": np.array([len(text) for text in texts], np.int64),
        "tokens": np.concatenate([np.zeros(0, np.int32), *texts]),
    }


def put_arrays(arrays: Arrays, tokenizer: int, responses: EarlierResponses) -> None:
    """Adds the responses in a file's content to `responses`. Raises ValueError if the file was made
    with another tokenizer."""
    if arrays["tokenizer"] != tokenizer:
        raise ValueError("is of another tokenizer than this run's")
    texts = iter(np.split(arrays["tokens"], np.cumsum(arrays["lengths"])))
    for count in arrays["texts"].tolist():
        prompt, *others = islice(texts, count)
        responses.put(prompt, others)
