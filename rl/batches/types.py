"""The types of an iteration's data, on the host: Prompt -> Rollout -> RolloutGroup -> TrainBatch.

Responses are decoded to text once, for rewards, and never tokenised again.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import numpy as np


class FinishReason(StrEnum):
    STOP = "stop"  # the policy ended its response
    LENGTH = "length"  # cut at max_completion_length


@dataclass(frozen=True)
class Prompt:
    id: int  # stable over a run and its resumptions; part of the random keys for sampling
    tokens: tuple[int, ...]
    text: str
    columns: Mapping[str, object]  # the data row's other columns by name, for reward functions
    messages: Sequence[Mapping[str, Any]] = ()  # messages of a chat; empty if the prompt is a text


@dataclass(frozen=True)
class Rollout:
    prompt: Prompt
    sample: int  # index in its group, 0 … num_generations - 1
    tokens: np.ndarray  # int32[length], the end-of-sequence token included if finish is STOP
    logprobs: np.ndarray  # float32[length], nats, under the distribution that sampled each token
    finish: FinishReason
    # Log-probabilities under softmax(logits / temperature), if filters such as top_p changed the
    # sampled distribution; None if they are equal to `logprobs`.
    unfiltered_logprobs: np.ndarray | None = None
    # The experts that computed each token but the last, int16[prompt + response - 1, layers, k], or
    # None if the policy has no experts.
    routed_experts: np.ndarray | None = None

    @property
    def policy_logprobs(self) -> np.ndarray:
        """Log-probabilities comparable to the trainer's: with temperature, without filters."""
        unfiltered = self.unfiltered_logprobs
        return self.logprobs if unfiltered is None else unfiltered


@dataclass(frozen=True)
class RolloutGroup:
    prompt: Prompt
    rollouts: Sequence[Rollout]
