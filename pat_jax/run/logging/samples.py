"""A few responses as people look at them: what was asked, said and earned.

Knows rollouts and what reward functions gave. Does not know where it is shown.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
from jaxtyping import Float

from pat_jax.rl.batches.types import Rollout
from pat_jax.rl.rewards.outcome import Failure
from pat_jax.rl.rewards.weighted_sum import FunctionScores


@dataclass(frozen=True)
class Sample:
    prompt: str
    completion: str
    reward: float | None  # None: it has none
    tokens: int
    finish: str
    # Of several functions what each gave, without its weight.
    rewards: dict[str, float | None] = field(default_factory=dict)
    answer: str | None = None  # the right one, where the problem has one

    @property
    def facts(self) -> str:
        """Such as "reward 1 (math 1, brevity -0.2), 57 tokens, stop"."""
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
    """
    Args:
      rewards: NaN where a response has none.
      functions: what each gave; of several it is part of a sample.
      chosen: of the responses, in order; None: all.
    """
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
        )


def table(step: int, samples: Sequence[Sample]) -> tuple[list[str], list[list[object]]]:
    """Columns and rows; a column for each function where there are several."""
    names = list(samples[0].rewards) if samples else []
    columns = ["step", "prompt", "response", "reward", *names, "tokens", "finish"]
    rows: list[list[object]] = [
        [step, x.prompt, x.completion, x.reward, *x.rewards.values(), x.tokens, x.finish]
        for x in samples
    ]
    return columns, rows


def _number(value: float | None) -> str:
    return "none" if value is None else f"{value:.3g}"
