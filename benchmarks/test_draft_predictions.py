"""What the planner foretells of drafts: how counts are kept, halved and compared."""

import numpy as np

from benchmarks.draft_counting import Group, Record, Rules, Steps, verify
from benchmarks.draft_predictions import BURST, SHORT, Counted, counts_of, errors, prior_of
from pat_jax.planning.drafts import MATCHES

DRAFT = 3


def test_counts_are_by_kind_of_match_and_tokens_accepted():
    matched, accepted = np.array([0, 1, 4, 4, 16]), np.array([0, 2, 0, 3, 3])
    steps = Steps(np.zeros(5, int), np.arange(5), matched, accepted)
    counts = counts_of(steps, DRAFT)
    assert counts.shape == (len(MATCHES) + 1, DRAFT + 1)
    assert {tuple(x) for x in np.argwhere(counts)} == {(0, 0), (1, 2), (3, 0), (3, 3), (6, 3)}
    assert counts.sum() == 5


def test_sets_weigh_the_same_in_the_prior():
    few, many = np.zeros((2, 7, 3), int)
    few[:] = [4, 0, 0], *[[1, 1, 2]] * 6
    many[:] = [0, 0, 0], *[[100, 0, 0]] * 6
    right, kinds = prior_of([few, many])
    # Of each kind 4 of 28 and 1 of 6 of the steps, of which 3 of 4 and none have the first token right.
    of_few, of_many = 4 / 28, 1 / 6
    np.testing.assert_allclose(right[:, 0], 0.75 * of_few / (of_few + of_many))
    np.testing.assert_allclose(right[:, 1], 2 / 3)
    np.testing.assert_allclose(kinds, [of_few / 2, *[(of_few + of_many) / 2] * 6])


def counted(num_groups: int) -> Counted:
    """Of prompts whose responses are all the same."""
    rng = np.random.default_rng(0)
    response = np.concatenate([np.arange(5)[rng.integers(5)] + np.arange(9) for _ in range(60)])
    groups = [Group("", [1], [response.tolist()], [])] * num_groups
    record = Record(groups, context=16)
    drafts = {
        n: verify(record, Rules(siblings=False, earlier=False, draft=n)) for n in (1, 2, SHORT, 8)
    }
    return Counted(np.full(num_groups, len(response)), drafts)


def test_bursts_are_all_steps_in_their_order():
    whole = counted(3)
    bursts = whole.bursts(2)
    np.testing.assert_array_equal(np.sum(bursts, axis=0), whole.counts(2))
    assert [x.sum() for x in bursts[:-1]] == [3 * BURST] * (len(bursts) - 1)
    assert 0 < bursts[-1].sum() <= 3 * BURST
    assert bursts[0][0].sum() > bursts[-1][0].sum()  # at first nothing is found


def test_groups_are_counted_alone():
    whole = counted(4)
    half = whole.among(np.array([0, 3]))
    assert half.came(8) == whole.came(8)
    np.testing.assert_array_equal(2 * half.counts(8), whole.counts(8))


def test_of_prompts_that_are_the_same_both_halves_are_foretold_alike():
    found = errors(counted(4), 8, splits=2)
    assert found["accepted a step"][0] < found["accepted a step"][-1]
    learned, came = (
        found[f"kinds of the {x}"] for x in ("prompts learned from", "steps that came")
    )
    # All but what was expected before: a few steps.
    np.testing.assert_allclose(learned["mean"], came["mean"], atol=4.0)
    # The error is that of the same prompts; its size is its absolute value.
    np.testing.assert_allclose(
        came["mean"], found["on the prompts learned from, with drafts of 8"], atol=4.0
    )
    assert np.all(np.array(came["mean size"]) == np.abs(came["mean"]))
    assert np.all(np.abs(came["mean"]) < np.abs(found["before anything was seen"]["mean"]))
