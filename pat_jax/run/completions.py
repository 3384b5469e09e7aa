"""What the policy says, for people: samples at each evaluation, and all of it in a file if asked.

Knows rollouts, rewards and text. Does not know how any of them comes about.
"""

import json
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Literal, Self

import numpy as np
from jaxtyping import Float

from pat_jax.common.errors import UserError
from pat_jax.common.files import open_lines
from pat_jax.rl.reward_outcome import Failure
from pat_jax.rl.reward_sum import FunctionScores
from pat_jax.rl.tokenizer import Tokenizer
from pat_jax.rl.types import Rollout

COMPLETIONS_FILE = "completions.jsonl"
WIDTH = 88  # characters of a prompt or a response on the terminal

Rewards = Float[np.ndarray, " responses"]


class Heard:
    """Passes responses on as they end, and keeps them in their order."""

    def __init__(self, pass_on: Callable[[int, Rollout], None]):
        self._pass_on, self._rollouts = pass_on, dict[int, Rollout]()

    def add(self, i: int, rollout: Rollout) -> None:
        self._rollouts[i] = rollout
        self._pass_on(i, rollout)

    @property
    def rollouts(self) -> list[Rollout]:
        return [self._rollouts[i] for i in sorted(self._rollouts)]


class Completions:
    """
    Args:
      folder: of the run, where the file goes.
      is_asked: for a file of all responses; otherwise it has those alone that an error would lose.
    """

    def __init__(self, tokenizer: Tokenizer, folder: Path, *, is_asked: bool):
        self._tokenizer, self._path = tokenizer, folder / COMPLETIONS_FILE
        self._file = open_lines(self._path) if is_asked else None

    def write(
        self,
        step: int,
        kind: Literal["train", "eval"],
        rollouts: Sequence[Rollout],
        rewards: Rewards,
        functions: Sequence[FunctionScores] = (),
    ) -> None:
        """Appends a line for each response. A step that is repeated after a kill is there twice.

        Args:
          functions: what each function gave; of several it is written beside the reward.
        """
        if self._file is None:
            return
        by_function = _by_function(functions) if len(functions) > 1 else [{}] * len(rollouts)
        for rollout, reward, parts in zip(rollouts, rewards.tolist(), by_function, strict=True):
            row = {
                "step": step,
                "kind": kind,
                "prompt": rollout.prompt.text,
                "completion": self._text(rollout),
                "reward": None if math.isnan(reward) else reward,
                **parts,
                "tokens": len(rollout.tokens),
                "finish": str(rollout.finish),
            }
            self._file.write(f"{json.dumps(row, ensure_ascii=False)}\n".encode())
        self._file.flush()

    @contextmanager
    def kept(
        self, step: int, kind: Literal["train", "eval"], rollouts: Sequence[Rollout]
    ) -> Iterator[None]:
        """Writes responses whose rewards end the run, so that what was generated is not lost.

        Raises:
          UserError: the one that was raised inside, which then says where they are.
        """
        try:
            yield
        except UserError as error:
            if self._file is None:
                self._file = open_lines(self._path)
            self.write(step, kind, rollouts, np.full(len(rollouts), np.nan, np.float32))
            raise UserError(f"{error} The responses are kept in {self._path}.") from error

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        if self._file is not None:
            self._file.close()

    def samples(self, rollouts: Sequence[Rollout], rewards: Rewards, count: int) -> Iterator[str]:
        """Lines for the first responses: of the same prompts at every evaluation."""
        for rollout, reward in zip(rollouts[:count], rewards.tolist(), strict=False):
            yield f"  prompt    {_shortened(rollout.prompt.text)}"
            yield f"  response  {_shortened(self._text(rollout))}"
            earned = "no reward" if math.isnan(reward) else f"reward {reward:.3g}"
            yield f"            {earned}, {len(rollout.tokens)} tokens, {rollout.finish}"

    def _text(self, rollout: Rollout) -> str:
        return self._tokenizer.decode(rollout.tokens.tolist())


def _by_function(functions: Sequence[FunctionScores]) -> list[dict[str, dict[str, float | None]]]:
    """The field `rewards` of each response: scores without their weights, null where there is none."""
    rows = zip(*(one.scores for one in functions), strict=True)
    names = [one.name for one in functions]
    return [
        {
            "rewards": {
                name: None if isinstance(x, Failure) else x
                for name, x in zip(names, row, strict=True)
            }
        }
        for row in rows
    ]


def _shortened(text: str) -> str:
    """On one line; of a long one its begin and its end, where the question and the answer are."""
    text = " ".join(text.split())
    if len(text) <= WIDTH:
        return text
    half = (WIDTH - 5) // 2
    return f"{text[:half]} ... {text[-half:]}"
