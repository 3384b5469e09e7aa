"""The running mean length of each prompt."""

import numpy as np

from pat_jax.planning.lengths import model
from pat_jax.planning.lengths.model import PromptMeans


def test_a_prompt_is_expected_to_be_as_it_was_and_a_stranger_as_all_are():
    means = PromptMeans().updated(np.array([10, 30, 100]), np.array([7, 7, 3]))
    assert means.expected(np.array([3, 5, 7, 3, 9]), 50.0).tolist() == [100, 50, 20, 100, 50]


def test_the_last_rollout_counts_as_much_as_those_before():
    means = PromptMeans()
    for length in (10, 20, 40):
        means = means.updated(np.full(4, length), np.full(4, 7))
    assert means.expected(np.array([7]), 0.0).tolist() == [27.5]


def test_memory_is_bounded_and_keeps_the_first(monkeypatch):
    monkeypatch.setattr(model, "MAX_PROMPTS", 3)
    means = PromptMeans().updated(np.array([1, 2]), np.array([9, 4]))
    means = means.updated(np.array([3, 4, 5]), np.array([1, 2, 9]))
    assert means.prompt.tolist() == [1, 4, 9]
    assert means.expected(np.array([9, 2]), 0.0).tolist() == [3, 0]
