"""Drawn and recorded groups of samples: as alike as stated, with the lengths of the set."""

import numpy as np
import pytest

from benchmarks.planner.prompt_groups import SAMPLES, Hierarchy, drawn_lengths, drawn_rollouts
from benchmarks.planner.regret_cells import RECORDED, Cell
from benchmarks.planner.workloads import LengthData
from pat_jax.profiling.predict.composer import SWITCH_S
from tests.published import DATA, needs_data

TOKENS = np.arange(1, 4001)
EVEN = LengthData("even", TOKENS, TOKENS, np.ones(len(TOKENS)), cap=4000)


@pytest.mark.parametrize(
    "groups", [Hierarchy(0.3), Hierarchy(0.9), Hierarchy(0.5, is_heavy=True)], ids=str
)
def test_samples_of_a_prompt_are_as_alike_as_stated_and_the_set_is_kept(groups):
    first, later = drawn_rollouts(EVEN, groups, 8000, seed=1)
    assert np.median(first.responses) == pytest.approx(2000, rel=0.1)
    quantiles = next(groups.epochs(np.random.default_rng(0), 4000))
    one, other = quantiles[:, 0], quantiles[:, 1]
    assert np.corrcoef(one, other)[0, 1] == pytest.approx(groups.share, abs=0.08)
    np.testing.assert_array_equal(first.prompt_id, later.prompt_id)
    np.testing.assert_array_equal(first.prompts, later.prompts)
    assert first.prompt_id is not None
    assert (np.unique(first.prompt_id, return_counts=True)[1] == SAMPLES).all()
    assert (first.responses != later.responses).mean() > 0.9


def test_the_length_model_has_learned_from_other_prompts():
    model = drawn_lengths(EVEN, Hierarchy(0.7))
    first, _ = drawn_rollouts(EVEN, Hierarchy(0.7), 1024, seed=3)
    assert first.prompt_id is not None
    assert len(model.prompts.prompt) and not np.isin(first.prompt_id, model.prompts.prompt).any()


@needs_data
def test_recorded_samples_are_used_once_and_are_followed_by_others_of_the_same_prompts():
    cell = Cell("8xH100", "llama-3.1-8b", 256, RECORDED, DATA, SWITCH_S, groups="recorded")
    first, later = cell.rollouts(seed=2)
    assert first.size == later.size == 256
    np.testing.assert_array_equal(first.prompt_id, later.prompt_id)
    by_prompt = np.log(first.responses.reshape(-1, SAMPLES))
    assert by_prompt.mean(axis=1).var() > 1.5 * by_prompt.var() / SAMPLES  # alike, not alone
