"""What the planner foretells of drafts: how counts are kept, halved and compared."""

import numpy as np

from benchmarks.draft_predictions import BURST, SHORT, Counted, prior_of
from pat_jax.planning.drafts import BRANCHES, DRAFTS, KINDS, MOST, Drafted
from pat_jax.profiling.simulate.draft_counting import Group, Record, Rules, Steps, verify
from pat_jax.profiling.simulate.draft_runs import counts_of

DRAFT = 3


def steps_of(matched: list[int], accepted: list[int], row: list[int]) -> Steps:
    zeros, step = np.zeros(len(row), int), np.arange(len(row))
    return Steps(zeros, np.array(row), step, np.array(matched), np.array(accepted), zeros, zeros)


def test_runs_go_on_where_the_match_has_grown_with_what_was_said():
    # Of one row: no match; a run of two tokens that goes on for 3 + 1 and then 2; one that is cut short by
    # another match than its own. Another row begins anew.
    found = counts_of(steps_of([0, 2, 6, 4, 1, 9], [0, 3, 2, 3, 0, 1], [0, 0, 0, 0, 0, 1]), DRAFT)
    assert found.begun.tolist() == [1, 1, 1, 1, 0, 1, 0]
    kind_of_two, kind_of_four = 2, 3
    assert not found.tried[BRANCHES].any() and found.forks[:, 0].sum() == 5  # steps with a match
    tried, right = found.tried[DRAFTS], found.right[DRAFTS]
    assert tried[kind_of_two].tolist() == [1] * 7 + [0] * (MOST - 7)
    assert right[kind_of_two].tolist() == [1] * 6 + [0] * (MOST - 6)
    # Four tokens matched, three were right, and the next match was not as long as eight.
    assert tried[kind_of_four].tolist() == [1] * 4 + [0] * (MOST - 4)
    assert right[kind_of_four].tolist() == [1] * 3 + [0] * (MOST - 3)


def test_branches_are_counted_where_the_draft_beside_them_is_wrong():
    row, ones = np.zeros(3, int), np.ones(3, int)
    # Of the first step the draft is right; then the branch says two tokens and none.
    drafts, branches = (2 * ones, np.array([1, 0, 0])), (np.array([5, 5, 0]), np.array([0, 2, 0]))
    found = counts_of(Steps(row, row, np.arange(3), *drafts, *branches), DRAFT)
    kind_of_two, kind_of_five = 2, 4
    assert found.forks[kind_of_two].tolist() == [1, 0, 0, 0, 2, 0, 0] and found.forks.sum() == 3
    assert found.tried[BRANCHES, kind_of_five].tolist() == [1] * 3 + [0] * (MOST - 3)
    assert found.right[BRANCHES, kind_of_five].tolist() == [1] * 2 + [0] * (MOST - 2)
    assert found.tried[BRANCHES].sum() == 3


def test_sets_weigh_the_same_in_the_prior():
    def of(runs: int, right: int) -> Drafted:
        shape = 2, KINDS, MOST
        forks = np.full((KINDS, KINDS), runs)
        return Drafted(np.full(KINDS, runs), np.full(shape, runs), np.full(shape, right), forks, 0)

    prior = prior_of([of(10, 10), of(1000, 0)])
    for name in ("PRIOR", "PRIOR_BRANCHES"):
        assert prior[name].shape == (KINDS - 1, 8) and (prior[name] == 0.5).all()
    for name in ("PRIOR_BEGUN", "PRIOR_FORKS"):
        np.testing.assert_allclose(prior[name], 1 / KINDS, atol=5e-4)


def counted(num_groups: int) -> Counted:
    """Of prompts whose responses are all the same."""
    rng = np.random.default_rng(0)
    response = np.concatenate([np.arange(5)[rng.integers(5)] + np.arange(9) for _ in range(60)])
    groups = [Group("", [1], [response.tolist()], [])] * num_groups
    record = Record(groups, context=16)
    drafts = {
        n: verify(record, Rules(siblings=False, earlier=False, draft=n)) for n in (1, 2, SHORT, 8)
    }
    return Counted.of(np.full(num_groups, len(response)), drafts, has_branches=False)


def test_bursts_are_all_steps_in_their_order():
    whole = counted(3)
    bursts = whole.bursts(2)
    assert sum(one.row_steps for one in bursts) == whole.steps[2].sum()
    assert sum(one.drafted.begun.sum() for one in bursts) == whole.counts(2).begun.sum()
    assert [one.row_steps for one in bursts[:-1]] == [3 * BURST] * (len(bursts) - 1)
    first, last = bursts[0].drafted, bursts[-1].drafted
    assert first.begun[0] > last.begun[0]  # at first nothing is found


def test_groups_are_counted_alone():
    whole = counted(4)
    half = whole.among(np.array([0, 3]))
    assert half.came(8) == whole.came(8)
    for one, other in zip(half.counts(8)[:5], whole.counts(8)[:5], strict=True):
        np.testing.assert_array_equal(2 * np.array(one), other)
