"""The result of an update: metrics of its optimizer steps, and which of them were applied."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import jax
import numpy as np
from jaxtyping import Array

from pat_jax.rl.algorithm.losses import Sums
from pat_jax.rl.algorithm.update import TrainState, Update

# What an optimizer step returns: sums for metrics, the gradient's norm, and whether it was applied.
Record = tuple[Sums, Array, Array]


@dataclass(frozen=True)
class UpdateResult:
    metrics: dict[str, float]
    applied: tuple[bool, ...]  # for each optimizer step, whether the gradient was finite
    updates_applied: int  # number of applied optimizer steps since the state's optimizer began


def summarized(
    role: str, update: Update, records: Sequence[Record], state: TrainState
) -> UpdateResult:
    """Returns the result of a role's optimizer steps, fetched from the devices at once. `state` is
    the training state after the last step."""
    fetched, step = jax.device_get((list(records), state.step))
    sums, norms, applied = zip(*fetched, strict=True)
    metrics = {f"{role}/{name}": value for name, value in update.summary(sums).items()}
    counted = [norm for norm, one in zip(norms, sums, strict=True) if one["weight"] > 0]
    metrics[f"{role}/grad_norm"] = float(np.mean(counted)) if counted else math.nan
    metrics[f"{role}/skipped_updates"] = float(len(applied) - sum(applied))
    return UpdateResult(metrics, tuple(map(bool, applied)), int(step))
