"""When complete groups are enough for gradients, while other responses are still generated."""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from pat_jax.common.hosts.lane_thread import LaneThread
from pat_jax.rl.batches.batches import TrainBatch
from pat_jax.rl.batches.types import FinishReason, Prompt, Rollout, RolloutGroup
from pat_jax.rl.rewards.weighted_sum import FunctionScores
from pat_jax.run.early_gradients import TrainedLane
from pat_jax.run.early_stages import EarlyLearning, EarlyStages
from pat_jax.run.lanes import Lanes
from pat_jax.training.summed_gradients import SummedGradients
from pat_jax.training.trainer import Trainer

SIZE, PROMPT, RESPONSE = 2, 28, 10  # responses of a group, tokens
ROW = 64


def scores_of(rows: Sequence[int]) -> list[FunctionScores]:
    return [FunctionScores("ones", "ones", 1.0, [1.0] * len(rows), [{}] * len(rows))]


def no_role(role: Trainer) -> SummedGradients:
    raise AssertionError("the lane has no role")


@pytest.mark.parametrize(("shares", "taken"), [(False, [[0], [1]]), (True, [[0, 1]])])
def test_a_prompt_that_responses_share_counts_once(shares: bool, taken: list[list[int]]):
    """A group has 76 tokens, more than a row of 64, or 49, too few to fill it."""
    found: list[list[int]] = []

    def batch_of(groups: Sequence[RolloutGroup], *_: object) -> TrainBatch:
        found.append([group.prompt.id for group in groups])
        return TrainBatch([], 1.0)

    prompts = [Prompt(i, (1,) * PROMPT, "text", {}) for i in range(2)]
    tokens = np.ones(RESPONSE, np.int32)
    scoring: Any = SimpleNamespace(scores_of=scores_of)
    learning = EarlyLearning(
        batch_of, no_role, lambda *_: True, "constant", [(1, ROW)], shares_prompts=shares
    )
    with LaneThread("lane") as thread:
        lanes = Lanes(trained=[TrainedLane(thread, [])])
        early = EarlyStages(lanes, learning, prompts, SIZE, 0, scoring=scoring)
        others = thread.gathering(lambda numbers: None, int)
        for index in range(SIZE * len(prompts)):
            prompt = prompts[index // SIZE]
            ended = Rollout(prompt, index % SIZE, tokens, np.zeros(RESPONSE), FinishReason.STOP)
            early.add(index, ended)
            early.note(index)
            others.add(index)
            others.wait()  # the lane has done what it was given before
        early.wait()
    assert found == taken
