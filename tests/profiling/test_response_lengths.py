"""Distributions of lengths, and rollouts drawn from them."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import kstest, spearmanr

from pat_jax.profiling.simulate.draw import Draw
from pat_jax.profiling.simulate.response_lengths import BUILT_IN, PROBABILITIES, ResponseLengths

CAP = 32_768


@pytest.mark.parametrize("name", BUILT_IN)
def test_a_built_in_one_has_its_quantiles(name: str):
    lengths = ResponseLengths.built_in(name)
    found = lengths.quantile(np.array(PROBABILITIES))
    np.testing.assert_allclose(found, BUILT_IN[name].tokens, rtol=0.02)
    assert (np.diff(lengths.tokens) >= 0).all() and BUILT_IN[name].source in lengths.source


@settings(deadline=None, max_examples=20)
@given(st.integers(0, 1000), st.sampled_from([0.0, 0.3, 0.9]), st.sampled_from([1, 8]))
def test_every_length_has_the_distribution_whatever_siblings_have(seed, correlation, samples):
    """One response of each prompt: the others are not independent of it."""
    lengths = ResponseLengths.built_in("reasoning")
    draw = Draw(4096, CAP, samples, correlation, seed=seed)
    drawn = lengths.draw(draw).responses[::samples]
    assert kstest(drawn, lengths.tokens).pvalue > 1e-5


def test_siblings_are_as_alike_as_asked():
    lengths = ResponseLengths.built_in("reasoning")
    for correlation in (0.0, 0.3, 0.7):
        drawn = lengths.draw(Draw(20_000, CAP, 2, correlation)).responses.reshape(-1, 2)
        # Spearman's of a Gaussian copula: 6/π·arcsin(ρ/2).
        expected = 6 / np.pi * np.arcsin(correlation / 2)
        found = spearmanr(drawn[:, 0], drawn[:, 1])
        assert found.statistic == pytest.approx(expected, abs=0.03)  # pyright: ignore[reportAttributeAccessIssue]  # no stubs


def test_an_equal_draw_is_the_same_and_another_seed_has_other_prompts():
    lengths, draw = ResponseLengths.built_in("math"), Draw(64, 4096)
    one, again, other = (lengths.draw(d) for d in (draw, draw, replace(draw, seed=1)))
    np.testing.assert_array_equal(one.responses, again.responses)
    assert one.prompt_id is not None and other.prompt_id is not None
    assert not set(one.prompt_id) & set(other.prompt_id)
    assert (np.bincount(one.prompt_id - one.prompt_id.min()) == 8).all()


def test_lengths_grow_and_are_cut():
    lengths, draw = ResponseLengths.built_in("reasoning"), Draw(4096, 16_384, 1)
    before, after = (
        lengths.draw(replace(draw.later(number, growth=0.1), seed=0)).responses for number in (0, 5)
    )
    grown = np.minimum(before * np.exp(0.5), 16_384)
    np.testing.assert_allclose(after, grown, atol=1.5)
    assert after.max() == 16_384


def test_samples_of_a_prompt_share_its_length():
    tokens, prompts = np.array([10, 20, 30, 40]), np.array([1, 2, 3, 4])
    lengths = ResponseLengths("mine", tokens, np.ones(4), prompts)
    drawn = lengths.draw(Draw(32, 100, 4)).prompts.reshape(-1, 4)
    assert (drawn == drawn[:, :1]).all() and set(drawn.flat) <= {1, 2, 3, 4}


def test_responses_that_pile_up_at_their_longest_were_cut_there():
    def cut_at(*tokens: int) -> int | None:
        found, counts = np.unique(np.array(tokens), return_counts=True)
        return ResponseLengths("mine", found, counts.astype(float)).cut_at

    assert cut_at(*range(1, 101), 100, 100) is None  # no more than thinning out
    assert cut_at(*range(1, 80), *[100] * 3) == 100
    assert cut_at(1, 2, 3) is None  # too few to say
    assert cut_at(*[5] * 1000, *range(1, 80), 100, 100) is None  # too few of all
    assert ResponseLengths.built_in("math").cut_at == 4096
    assert all(ResponseLengths.built_in(name).cut_at is None for name in ("reasoning", "short"))
