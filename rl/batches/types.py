"""The values that flow through an iteration: Prompt -> Rollout -> RolloutGroup -> TrainBatch.

They are on the host. Text is decoded from tokens once, for rewards, and never tokenised again.
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
    id: int  # stable over the run and its resumptions; sampling keys are folded from it
    tokens: tuple[int, ...]
    text: str
    columns: Mapping[str, object]  # every other column of the data row, passed on to rewards
    messages: Sequence[Mapping[str, Any]] = ()  # of a chat; empty: the prompt is a text


@dataclass(frozen=True)
class Rollout:
    prompt: Prompt
    sample: int  # 0 … num_generations - 1
    tokens: np.ndarray  # int32[length], the end-of-sequence token included when finish is STOP
    logprobs: np.ndarray  # float32[length], nats under the distribution that sampled each token
    finish: FinishReason
    # Log-probabilities under softmax(logits / temperature), if filters such as top_p changed the
    # distribution that was sampled; None: they are `logprobs`.
    unfiltered_logprobs: np.ndarray | None = None
    # int16[prompt + response - 1, layers, k]: the experts that computed each token but the last;
    # None: the policy has no experts.
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
