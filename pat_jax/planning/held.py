"""Counts the KV cache tokens of a replica's sequences, for attention kernels that read only these.

Knows counts of tokens. Does not know what reading them costs.
"""

import numpy as np


def most_held(
    context: np.ndarray, sampled: np.ndarray, replica: np.ndarray, steps: int, every: int
) -> np.ndarray:
    """Returns how many tokens of the KV cache a step reads in the replica that reads most:
    float[windows], the mean over the steps of each window of `every` steps.

    A sequence reads one more token after each that it samples, and none once it has ended.

    Args:
      context: int[running], tokens of each sequence in the cache at the first step.
      sampled: int[running], tokens that each sequence samples, at most one a step.
      replica: int[running], index of the replica of each sequence.
    """
    windows = -(-steps // every)
    if not windows or not len(replica):
        return np.zeros(windows)
    replicas = int(replica.max()) + 1
    last = np.maximum(sampled - 1, 0) // every  # window in which each ends
    at = replica * windows + last

    def summed(weights: np.ndarray) -> np.ndarray:
        return np.bincount(at, weights, replicas * windows).reshape(replicas, windows)

    def going_on(weights: np.ndarray) -> np.ndarray:
        """Returns the sum of `weights` over the sequences that end in a later window."""
        table = summed(weights)
        return table[:, ::-1].cumsum(axis=1)[:, ::-1] - table

    before = last * every
    rest = sampled - last * every
    reach = np.arange(windows) * every + (every + 1) / 2
    whole = going_on(context) + going_on(np.ones(len(at))) * reach
    ending = summed(rest * (context + before + (rest + 1) / 2)) / every
    return (whole + ending).max(axis=0)
