"""Shows a few responses at each evaluation, and writes all to a file with --log_completions.

Knows rollouts, rewards and text. Does not know what generates or scores.
"""

import json
import logging
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Literal, Self

import numpy as np
from jaxtyping import Float

from pat_jax.common.errors import UserError, printable
from pat_jax.common.files import open_lines
from pat_jax.rl.batches.types import Rollout, RolloutGroup
from pat_jax.rl.rewards.responses import text_of
from pat_jax.rl.rewards.weighted_sum import FunctionScores
from pat_jax.rl.text.tokenizer import HuggingFaceTokenizer, Tokenizer
from pat_jax.run.logging.samples import Sample, to_samples

COMPLETIONS_FILE = "completions.jsonl"
PROMPTS_SHOWN, RESPONSES_SHOWN = 2, 4  # samples of an iteration: prompts, responses to each
WIDTH = 88  # characters of a prompt or a response on the terminal

log = logging.getLogger(__name__)

Rewards = Float[np.ndarray, " responses"]


class DroppedTokens:
    """Warns once if a policy generates special tokens that are left out of texts. Tokens of begin,
    end and padding do not count."""

    def __init__(self, tokenizer: Tokenizer, notify: Callable[[str], None]):
        is_known = isinstance(tokenizer, HuggingFaceTokenizer)
        self._texts = dict(tokenizer.dropped) if is_known else {}
        self._notify = notify

    def look(self, rollouts: Sequence[Rollout]) -> None:
        if not self._texts or not rollouts:
            return
        tokens = np.concatenate([one.tokens for one in rollouts])
        found = tokens[np.isin(tokens, list(self._texts))]
        if found.size:
            many = sum(bool(np.isin(one.tokens, found).any()) for one in rollouts)
            self._notify(
                f"{many} of {len(rollouts)} responses have special tokens such as "
                f"{self._texts[int(found[0])]!r}, which rewards and written responses leave out: "
                "--reward_skip_special_tokens false keeps them"
            )
            self._texts = {}


class Completions:
    """Writes responses to `completions.jsonl`, and picks a few to show.

    Args:
      folder: the run's folder.
      notify: called once if texts leave out special tokens of responses.
      is_asked: write all responses; otherwise only those that an error would lose.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        folder: Path,
        notify: Callable[[str], None] = log.warning,
        *,
        is_asked: bool,
    ):
        self._dropped = DroppedTokens(tokenizer, notify)
        self._tokenizer = tokenizer
        self._path = folder / COMPLETIONS_FILE
        self._file = open_lines(self._path) if is_asked else None

    def write(
        self,
        step: int | None,
        kind: Literal["train", "eval"],
        rollouts: Sequence[Rollout],
        rewards: Rewards,
        functions: Sequence[FunctionScores] = (),
        names: Sequence[str] = (),
    ) -> None:
        """Appends a line for each response. A step that is repeated after a kill appears twice.

        Args:
          step: the run's step; None outside of a run.
          functions: the scores of each reward function; written if there are several.
          names: the name of each response's problem set, if there are sets.
        """
        self._dropped.look(rollouts)
        if self._file is None:
            return
        samples = to_samples(rollouts, rewards, functions, self._text)
        for i, (rollout, sample) in enumerate(zip(rollouts, samples, strict=True)):
            row = {
                **({} if step is None else {"step": step, "kind": kind}),
                **({"data": names[i]} if names else {}),
                "id": rollout.prompt.id,
                "sample": rollout.sample,
                "prompt": sample.prompt,
                "completion": sample.completion,
                "reward": sample.reward,
                **({"rewards": sample.rewards} if sample.rewards else {}),
                "tokens": sample.tokens,
                "finish": sample.finish,
            }
            self._file.write(f"{json.dumps(row, ensure_ascii=False)}\n".encode())
        self._file.flush()

    @contextmanager
    def kept(
        self,
        step: int | None,
        kind: Literal["train", "eval"],
        rollouts: Sequence[Rollout],
        names: Sequence[str] = (),
    ) -> Iterator[None]:
        """Writes the responses if a UserError is raised inside, such as by a reward, so that they
        are not lost. Adds the file's path to the error."""
        try:
            yield
        except UserError as error:
            if self._file is None:
                self._file = open_lines(self._path)
            nothing = np.full(len(rollouts), np.nan, np.float32)
            self.write(step, kind, rollouts, nothing, names=names)
            raise UserError(f"{error} The responses are kept in {self._path}.") from error

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        if self._file is not None:
            self._file.close()

    def few(
        self,
        groups: Sequence[RolloutGroup],
        rewards: Float[np.ndarray, "groups samples"],
        functions: Sequence[FunctionScores],
    ) -> list[Sample]:
        """Returns several responses to each of the first prompts, to show how rewards differ."""
        size = len(groups[0].rollouts)
        chosen = [
            group * size + sample
            for group in range(min(PROMPTS_SHOWN, len(groups)))
            for sample in range(min(RESPONSES_SHOWN, size))
        ]
        rollouts = [one for group in groups for one in group.rollouts]
        return list(to_samples(rollouts, rewards.reshape(-1), functions, self._text, chosen))

    def samples(self, rollouts: Sequence[Rollout], rewards: Rewards, count: int) -> Iterator[str]:
        """Yields lines about the first `count` responses."""
        for rollout, reward in zip(rollouts[:count], rewards.tolist(), strict=False):
            yield f"  prompt    {_shortened(rollout.prompt.text)}"
            yield f"  response  {_shortened(self._text(rollout))}"
            earned = "no reward" if math.isnan(reward) else f"reward {reward:.3g}"
            yield f"            {earned}, {len(rollout.tokens)} tokens, {rollout.finish}"

    def _text(self, rollout: Rollout) -> str:
        return text_of(rollout, self._tokenizer)


def _shortened(text: str) -> str:
    """Returns the text on one line. A long one keeps its begin and end, as they have question and
    answer."""
    text = printable(" ".join(text.split()))
    if len(text) <= WIDTH:
        return text
    half = (WIDTH - 5) // 2
    return f"{text[:half]} ... {text[-half:]}"
