"""Length models that several tests ask."""

from functools import cache

import numpy as np
from hypothesis import strategies as st

from pat_jax.planning.lengths.baseline import Baseline
from pat_jax.planning.lengths.model import LengthModel

CAP = 60
responses = st.lists(
    st.tuples(st.integers(1, CAP), st.booleans(), st.integers(0, 5)), min_size=1, max_size=30
)


def learned(*rollouts, cap: int = CAP, prior_weight: float = 2.0) -> LengthModel:
    """From rollouts of (length, is cut, prompt)."""
    model = LengthModel(Baseline.empty(cap, prior_weight))
    for rollout in rollouts:
        lengths, is_cut, prompt = (np.array(column) for column in zip(*rollout, strict=True))
        model = model.updated(lengths, is_cut, prompt)
    return model


def log_normal(rng: np.random.Generator, count: int, median: float = 300.0) -> np.ndarray:
    return np.maximum(rng.lognormal(np.log(median), 0.6, count), 1).astype(int)


@cache
def experienced_model() -> LengthModel:
    """Two epochs of 100 prompts, 8 samples each; a prompt's lengths are much alike."""
    rng, model = np.random.default_rng(3), LengthModel.empty(4096)
    level = rng.lognormal(np.log(300), 0.5, 100)
    for _ in range(2):
        lengths = np.repeat(level, 8) * rng.lognormal(0, 0.3, 800)
        model = model.updated(
            lengths.astype(int), np.zeros(800, bool), np.repeat(np.arange(100), 8)
        )
    return model
