"""What the policy says, for people: samples at each evaluation, and all of it in a file if asked.

Knows rollouts, rewards and text. Does not know how any of them comes about.
"""

import json
import math
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Literal, Self

import numpy as np
from jaxtyping import Float

from pat_jax.common.files import open_lines
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
      folder: where the file of all responses goes; None writes none.
    """

    def __init__(self, tokenizer: Tokenizer, folder: Path | None):
        self._tokenizer = tokenizer
        self._file = folder and open_lines(folder / COMPLETIONS_FILE)

    def write(
        self,
        step: int,
        kind: Literal["train", "eval"],
        rollouts: Sequence[Rollout],
        rewards: Rewards,
    ) -> None:
        """Appends a line for each response. A step that is repeated after a kill is there twice."""
        if self._file is None:
            return
        for rollout, reward in zip(rollouts, rewards.tolist(), strict=True):
            row = {
                "step": step,
                "kind": kind,
                "prompt": rollout.prompt.text,
                "completion": self._text(rollout),
                "reward": None if math.isnan(reward) else reward,
                "tokens": len(rollout.tokens),
                "finish": str(rollout.finish),
            }
            self._file.write(f"{json.dumps(row, ensure_ascii=False)}\n".encode())
        self._file.flush()

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


def _shortened(text: str) -> str:
    """On one line; of a long one its begin and its end, where the question and the answer are."""
    text = " ".join(text.split())
    if len(text) <= WIDTH:
        return text
    half = (WIDTH - 5) // 2
    return f"{text[:half]} ... {text[-half:]}"
