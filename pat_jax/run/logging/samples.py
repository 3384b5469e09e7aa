"""A few responses for people to look at, and their file in the run's folder.

Knows rollouts and scores. Does not know where they are shown.
"""

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float

from pat_jax.common.files import replace_text
from pat_jax.common.json_text import of_json
from pat_jax.rl.batches.types import Rollout
from pat_jax.rl.rewards.outcome import Failure
from pat_jax.rl.rewards.weighted_sum import FunctionScores
from pat_jax.run.checkpoints.json_state import gone_on_with, read_kept
from pat_jax.run.files.folder import SAMPLES_FILE

MOST_STEPS = 50  # newest steps in the file
MOST_CHARACTERS = 4000  # a longer text keeps its begin and end


@dataclass(frozen=True)
class Sample:
    prompt: str
    completion: str
    reward: float | None  # None: it could not be scored
    tokens: int
    finish: str
    # The unweighted score of each reward function, if there are several.
    rewards: dict[str, float | None] = field(default_factory=dict)
    answer: str | None = None  # the problem's right answer, if it has one
    messages: list[dict[str, str]] = field(default_factory=list)  # of a chat: role, content

    @property
    def facts(self) -> str:
        """A line such as "reward 1 (math 1, brevity -0.2), 57 tokens, stop"."""
        parts = ", ".join(f"{name} {_number(score)}" for name, score in self.rewards.items())
        earned = f"reward {_number(self.reward)}" + (f" ({parts})" if parts else "")
        return f"{earned}, {self.tokens:,} tokens, {self.finish}"


def to_samples(
    rollouts: Sequence[Rollout],
    rewards: Float[np.ndarray, " responses"],
    functions: Sequence[FunctionScores],
    decode: Callable[[Rollout], str],
    chosen: Sequence[int] | None = None,
) -> Iterator[Sample]:
    """Yields a sample for each response whose index is `chosen`; None takes all. A reward of NaN
    becomes None. If there are several reward functions, a sample has the score of each."""
    several = functions if len(functions) > 1 else ()
    for i in range(len(rollouts)) if chosen is None else chosen:
        scores = {one.name: one.scores[i] for one in several}
        answer = rollouts[i].prompt.columns.get("answer")
        yield Sample(
            rollouts[i].prompt.text,
            decode(rollouts[i]),
            None if math.isnan(rewards[i]) else float(rewards[i]),
            len(rollouts[i].tokens),
            str(rollouts[i].finish),
            {name: None if isinstance(x, Failure) else x for name, x in scores.items()},
            None if answer is None else str(answer),
            [
                {"role": str(x.get("role")), "content": str(x.get("content") or "")}
                for x in rollouts[i].prompt.messages
            ],
        )


def table(step: int, samples: Sequence[Sample]) -> tuple[list[str], list[list[object]]]:
    """Returns columns and rows of a table. Several reward functions have a column each."""
    names = list(samples[0].rewards) if samples else []
    columns = ["step", "prompt", "response", "reward", *names, "tokens", "finish"]
    rows: list[list[object]] = [
        [step, x.prompt, x.completion, x.reward, *x.rewards.values(), x.tokens, x.finish]
        for x in samples
    ]
    return columns, rows


def _number(value: float | None) -> str:
    return "none" if value is None else f"{value:.3g}"


class SamplesFile:
    """The file of samples in a run's folder. A resumed run keeps the samples of steps before
    `resume_step`."""

    def __init__(self, folder: Path, resume_step: int | None):
        self._folder = folder
        found = {} if resume_step is None else gone_on_with(read_samples, folder, "samples")
        self._steps = {step: few for step, few in found.items() if step < (resume_step or 0)}

    def add(self, step: int, samples: Sequence[Sample]) -> None:
        """Adds the samples of `step`, and writes the file."""
        self._steps[step] = [_cut(one) for one in samples]
        newest = sorted(self._steps, reverse=True)[:MOST_STEPS]
        self._steps = {step: self._steps[step] for step in newest}
        rows = {str(step): [asdict(one) for one in few] for step, few in self._steps.items()}
        replace_text(self._folder / SAMPLES_FILE, f"{json.dumps(rows)}\n")


def read_samples(folder: Path) -> Mapping[int, Sequence[Sample]]:
    """Returns the samples of a run by step, the newest first, with long texts cut. Without a file
    there are none. Raises UserError if the file is not as a run writes it."""
    return read_kept(folder / SAMPLES_FILE, "the samples of its steps", _samples, {})


def _samples(rows: Any) -> Mapping[int, Sequence[Sample]]:
    return {int(step): [of_json(Sample, each) for each in few] for step, few in rows.items()}


def _cut(sample: Sample) -> Sample:
    texts = {"prompt": sample.prompt, "completion": sample.completion, "answer": sample.answer}
    messages = [
        {name: _shortened(text) or "" for name, text in message.items()}
        for message in sample.messages
    ]
    cut = {name: _shortened(text) for name, text in texts.items()}
    return replace(sample, **cut, messages=messages)


def _shortened(text: str | None) -> str | None:
    if text is None or len(text) <= MOST_CHARACTERS:
        return text
    half = MOST_CHARACTERS // 2
    return f"{text[:half]}\n[… {len(text) - 2 * half:,} characters …]\n{text[-half:]}"
