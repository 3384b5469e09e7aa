"""Metrics of an update's speed, its share of the devices' peak, and their memory."""

from collections.abc import Sequence

import numpy as np
from jaxtyping import Int

from pat_jax.common.chips import chip_of
from pat_jax.common.devices import Device
from pat_jax.engine.sizing.device_memory import peak_bytes
from pat_jax.planning.memory import GIB
from pat_jax.rl.batches.types import RolloutGroup
from pat_jax.training.model_flops import training_flops
from pat_jax.training.trainable_params import TrainableParams


def describe_update(
    devices: Sequence[Device],
    lengths: Int[np.ndarray, " sequences"],
    shared: Int[np.ndarray, " sequences"] | int = 0,
    *,
    seconds: float,
    flops: float,
) -> dict[str, float]:
    """Returns the metrics of an update's speed, without `train/mfu` if the peak is not known.

    Args:
      lengths: tokens of each sequence.
      shared: for each sequence, the number of its first tokens that another sequence shares.
      seconds: time of the whole update.
      flops: floating-point operations of all forward and backward passes of the update.
    """
    measured = {"train/tokens_per_s": float(np.sum(lengths - shared)) / seconds}
    if chip := chip_of(devices[0].device_kind):
        measured["train/mfu"] = flops / seconds / (chip.flops_s * len(devices))
    return measured


def flops_of(
    trained: TrainableParams,
    lengths: Int[np.ndarray, " sequences"],
    shared: Int[np.ndarray, " sequences"] | int = 0,
) -> float:
    """Returns the floating-point operations of a model's pass over these sequences."""
    weights = trained.lora.active_weights if trained.lora else None
    return training_flops(trained.policy.config, lengths, shared, adapter_weights=weights)


def describe_memory(devices: Sequence[Device]) -> dict[str, float]:
    """Returns `memory/peak_gib` of the fullest device, if the backend reports it."""
    peak = peak_bytes(devices)
    return {} if peak is None else {"memory/peak_gib": peak / GIB}


def sequence_lengths(groups: Sequence[RolloutGroup]) -> np.ndarray:
    """Returns the tokens of each response and its prompt together, int[responses]."""
    return np.array(
        [len(one.prompt.tokens) + len(one.tokens) for group in groups for one in group.rollouts]
    )
