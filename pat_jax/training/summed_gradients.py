"""The gradient of an optimizer step as a sum to which batches are added one by one."""

from dataclasses import dataclass, replace

import jax
import numpy as np

from pat_jax.rl.algorithm.update import TrainState
from pat_jax.rl.batches.batches import TrainBatch
from pat_jax.training.trainer import Trainer
from pat_jax.training.update_result import UpdateResult


@dataclass
class SummedGradients:
    """The sum of a trained role's gradients, from one state.

    The role's programs run on the calling thread's devices; call all methods on one thread at a
    time.
    """

    role: Trainer
    state: TrainState
    share: float = 0.0  # of all batches so far

    def __post_init__(self):
        self.state = self.role.placement.begun(self.state)
        self._grads, self._sums = self.role.no_gradients(self.state)

    def add(self, batch: TrainBatch, share: float) -> None:
        """Adds the gradient of a batch of one mini-batch, whose weights add up to at most 1, and
        returns when it is computed.

        Args:
          share: the factor of the batch's weights, such as its number of tokens in the loss.
        """
        (mini,) = batch.mini_batches
        self.share += share
        for micro in mini:
            factor = np.float32(share)
            weighted = replace(micro, weights=micro.weights * factor)
            self._grads, self._sums = self.role.add_gradients(
                self.state, weighted, self._grads, self._sums
            )
        jax.block_until_ready(self._sums)

    def apply(self) -> tuple[TrainState, UpdateResult]:
        """Takes the optimizer step by the sum divided by all shares."""
        factor = np.float32(1 / self.share if self.share else 0.0)
        return self.role.apply_gradients(self.state, self._grads, self._sums, factor)
