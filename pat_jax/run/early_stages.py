"""What is done with the responses of one batch while others are still generated.

Joins columns and gradients with rewards: knows which of them a group waits for. Does not know how
any of them is computed.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from jaxtyping import Float

from pat_jax.rl.algorithm.aggregation import Aggregation
from pat_jax.rl.batches.batches import TrainBatch, read_prefixes, share_of
from pat_jax.rl.batches.packing import Shape, fills
from pat_jax.rl.batches.types import Prompt, Rollout, RolloutGroup
from pat_jax.rl.rewards.by_function import ScoresByFunction
from pat_jax.rl.rewards.scorer import Scoring
from pat_jax.rl.rewards.weighted_sum import weighted_sum
from pat_jax.run.early_columns import Columns, EarlyColumns
from pat_jax.run.early_gradients import EarlyGradients
from pat_jax.run.lanes import Lanes, length_of
from pat_jax.run.own_reads import OwnReads
from pat_jax.training.summed_gradients import SummedGradients
from pat_jax.training.trainer import Trainer

# From groups, their rewards, scores and columns to what is learned from them.
BatchOf = Callable[
    [Sequence[RolloutGroup], Float[np.ndarray, "groups samples"], ScoresByFunction, Columns],
    TrainBatch,
]


@dataclass(frozen=True)
class EarlyLearning:
    """How gradients are summed early."""

    batch_of: BatchOf
    begin: Callable[[Trainer], SummedGradients]
    trains: Callable[[Trainer, int], bool]  # whether an iteration, from 0, trains a role
    aggregation: Aggregation
    micro_shapes: Sequence[Shape]
    shares_prompts: bool  # whether the responses of a group may share their prompt in a row


@dataclass
class EarlyStages:
    """The early columns and gradients of one batch: `size` responses to each of `prompts`.

    Args:
      learning: None: no gradients are summed early.
      step: the iteration, from 0.
    """

    lanes: Lanes
    learning: EarlyLearning | None
    prompts: Sequence[Prompt]
    size: int
    step: int
    own: OwnReads | None = None  # reads once all responses have ended
    scoring: Scoring[Rollout] | None = None  # of the rewards, once it has begun
    _ended: dict[int, Rollout] = field(default_factory=dict)

    def __post_init__(self):
        self.gradients = self._gradients()
        on_read = self.note if self.gradients else lambda index: None
        self.columns = self.own or EarlyColumns(self.lanes.readers, on_read)

    @property
    def read_early(self) -> EarlyColumns | None:
        """What models have read while others were generated; None: nothing."""
        if isinstance(found := self.columns, OwnReads):
            return None
        return found if found.columns else None

    def add(self, index: int, ended: Rollout) -> None:
        """Adds the response `index`, which has ended."""
        self._ended[index] = ended
        self.columns.add(index, ended)

    def note(self, index: int) -> None:
        """Notes that a response has its reward, or the columns of a lane."""
        if self.gradients is not None:
            self.gradients.note(index // self.size)

    def ask(self) -> None:
        """Has the lanes use what waits for more responses: none come anymore."""
        self.columns.ask()
        if self.gradients is not None:
            self.gradients.ask()

    def wait(self) -> None:
        """Waits for all columns and gradients; all rewards must be there."""
        self.columns.wait(len(self._ended))
        if self.gradients is not None:
            self.gradients.wait()

    def _gradients(self) -> EarlyGradients | None:
        if (learning := self.learning) is None:
            return None
        lanes = [
            replace(lane, roles=[x for x in lane.roles if learning.trains(x, self.step)])
            for lane in self.lanes.trained
        ]
        parts = self.size * (1 + len(self.lanes.readers))
        made_of = lanes, len(self.prompts), parts, self._batch, learning.begin
        return EarlyGradients(*made_of, self._fill)

    def _fill(self, numbers: Sequence[int]) -> bool:
        """Whether complete groups fill micro-batches."""
        assert self.learning is not None
        some = [self._ended[n * self.size + i] for n in numbers for i in range(self.size)]
        shared = read_prefixes(some) if self.learning.shares_prompts else None
        return fills(list(map(length_of, some)), self.learning.micro_shapes, shared)

    def _batch(self, numbers: Sequence[int]) -> tuple[TrainBatch, float]:
        """Returns what is learned from complete groups, and their share."""
        assert self.learning is not None and self.scoring is not None
        rows = [n * self.size + i for n in numbers for i in range(self.size)]
        by_group = [[self._ended[n * self.size + i] for i in range(self.size)] for n in numbers]
        groups = [
            RolloutGroup(self.prompts[n], tuple(x)) for n, x in zip(numbers, by_group, strict=True)
        ]
        scores = self.scoring.scores_of(rows)
        rewards = weighted_sum(scores)[0].reshape(len(numbers), -1)
        by_function = ScoresByFunction.of(scores, rewards)
        batch = self.learning.batch_of(groups, rewards, by_function, self.columns.of(rows))
        return batch, share_of(batch, self.learning.aggregation)
