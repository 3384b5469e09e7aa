"""Responses and groups of them as a rollout has them, made of their tokens."""

from collections.abc import Iterable, Sequence

import numpy as np

from pat_jax.rl.batches.types import FinishReason, Prompt, Rollout, RolloutGroup

PROMPT = Prompt(0, (1,), "", {})


def response(
    tokens: Sequence[int] | np.ndarray,
    prompt: Prompt = PROMPT,
    sample: int = 0,
    finish: FinishReason = FinishReason.STOP,
    *,
    logprob: float = 0.0,
    routes: np.ndarray | None = None,
) -> Rollout:
    """Every token has the log-probability `logprob`."""
    ids, logprobs = np.asarray(tokens, np.int32), np.full(len(tokens), logprob, np.float32)
    return Rollout(prompt, sample, ids, logprobs, finish, None, routes)


def group_of(
    each: Iterable[Sequence[int] | np.ndarray],
    prompt: Prompt = PROMPT,
    finish: FinishReason = FinishReason.STOP,
) -> RolloutGroup:
    """Of the tokens of each response."""
    rollouts = [response(tokens, prompt, i, finish) for i, tokens in enumerate(each)]
    return RolloutGroup(prompt, rollouts)
