"""Kullback-Leibler divergences in float64, of made-up logits."""

import numpy as np

VOCABULARY = 11


def logits(seed: int, spread: float = 2.0) -> tuple[np.ndarray, np.ndarray]:
    """Of a policy and of its teacher at one position."""
    drawn = np.random.default_rng(seed).normal(0, spread, (2, VOCABULARY))
    return drawn[0].astype(np.float32), drawn[1].astype(np.float32)


def log_softmax(x: np.ndarray) -> np.ndarray:
    x = np.asarray(x, np.float64)
    x = x - x.max(axis=-1, keepdims=True)
    return x - np.log(np.exp(x).sum(axis=-1, keepdims=True))


def reverse_kl(policy: np.ndarray, teacher: np.ndarray, k: int) -> tuple[float, np.ndarray]:
    """KL(policy || teacher) of the distributions over the teacher's k likeliest tokens and all others
    as one, and its gradient in the policy's logits."""
    p, q = np.exp(log_softmax(policy)), np.exp(log_softmax(teacher))
    outcome = np.full(len(p), k)
    ids = np.argsort(-teacher)[:k]
    outcome[ids] = np.arange(k)
    p_of, q_of = (np.bincount(outcome, x, k + 1)[: k + (k < len(p))] for x in (p, q))
    apart = np.log(p_of / q_of)
    kl = float(p_of @ apart)
    return kl, p * (apart[outcome] - kl)
