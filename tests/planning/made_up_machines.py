"""Machines on which TP pays or does not, and length models of a few known lengths."""

import numpy as np
from fakes import SPLITS, made_up_latency

from pat_jax.planning.lengths.baseline import Baseline
from pat_jax.planning.lengths.model import LengthModel
from pat_jax.planning.types import Split

DP8, DP4TP2, DP2TP4, TP8 = SPLITS
CAP = 400


def lengths_of(*ended: tuple[int, int]) -> LengthModel:
    """Many responses, (length, how many of them) each, and hardly a prior."""
    model = LengthModel(Baseline.empty(CAP, 1e-3))
    lengths = np.concatenate([np.full(count, length) for length, count in ended])
    return model.updated(lengths, np.zeros(len(lengths), bool))


def machine(
    step: dict[Split, float], *, reshard=0.5, migrate_per_token=5e-4, per_row=0.0, **options
):
    return made_up_latency(
        step,
        {split: per_row * split.tp for split in step},
        reshard=reshard,
        migrate_per_token=migrate_per_token,
        max_rows=128,
        lengths=(64, 512),
        **options,
    )


FASTER_WITH_TP = {DP8: 0.8, DP4TP2: 0.5, DP2TP4: 0.3, TP8: 0.2}
SLOWER_WITH_TP = {DP8: 0.2, DP4TP2: 0.3, DP2TP4: 0.5, TP8: 0.8}
