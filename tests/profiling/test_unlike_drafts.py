"""Replays in which each sequence accepts drafts by its own acceptance."""

from dataclasses import replace

import numpy as np
import pytest
from drafting_machines import ALL, DRAFTS, HALF, NOTHING, acceptance_of, drafting
from fakes import SPLITS
from hypothesis import given
from hypothesis import strategies as st
from replays import CAP, MACHINE, make_workload, queued

from pat_jax.planning.drafts import DRAFTS as OF_RUNS
from pat_jax.planning.planner.scripts import FixedLayout
from pat_jax.profiling.simulate.machine import Workload
from pat_jax.profiling.simulate.simulator import replay

DP8, _, _, TP8 = SPLITS
ALIKE = Workload(np.full(16, 10), np.full(16, 120), CAP)
EVERY = MACHINE.check_every // 2  # steps between two tests of a burst with drafts


def fixed(split, budget: int) -> FixedLayout:
    return FixedLayout(split, budget=budget, reach=HALF.reach)


@given(queued, st.sampled_from(SPLITS), st.sampled_from(DRAFTS.budgets), st.floats(0, 1))
def test_sequences_that_accept_alike_are_as_the_machine_has_it(workload, split, budget, right):
    """Of a planner that believes the truth: beliefs of its own would share out the room of steps."""
    truth = acceptance_of(right, 0.9)
    planner = FixedLayout(split, budget=budget, reach=truth.reach)
    each = replace(workload, accepts=[truth] * workload.size)
    of_machine, done = (replay(x, planner, drafting(truth)) for x in (workload, each))
    assert done.bursts == of_machine.bursts and done.total_s == of_machine.total_s


@pytest.mark.parametrize("budget", DRAFTS.budgets)
def test_each_sequence_goes_on_as_fast_as_its_own_drafts_are_right(budget):
    """By hand: of 16 that say 120 tokens half get everything right, and half nothing."""
    accepts = [ALL, NOTHING] * 8
    done = replay(replace(ALIKE, accepts=accepts), fixed(TP8, budget), drafting(HALF))
    assert done.tokens == 16 * 120
    # Rows that the first have left are room for the others: of those nothing more comes.
    fast, slow = 120 // (1 + budget), 120
    assert done.busy_rows == 8 * (fast + slow)
    assert done.decode_steps == -(-slow // EVERY) * EVERY


def test_one_long_sequence_that_accepts_little_sets_the_end():
    """The mean of all is the same, whichever of them it is."""
    lengths = np.array([50] * 15 + [CAP])
    long = Workload(np.full(16, 10), lengths, CAP)
    unlucky = replace(long, accepts=[HALF] * 15 + [NOTHING])
    lucky = replace(long, accepts=[NOTHING] + [HALF] * 15)
    seconds = [replay(x, fixed(TP8, 3), drafting(HALF)).total_s for x in (unlucky, long, lucky)]
    assert seconds[0] > 1.3 * seconds[1] and seconds[2] < 1.1 * seconds[1]


def test_counts_are_of_what_each_has_accepted():
    good, bad = acceptance_of(0.8), acceptance_of(0.2)
    seen = []

    class Watching(FixedLayout):
        def observe(self, outcome):
            seen.append(outcome)

    each = replace(ALIKE, accepts=[good] * 8 + [bad] * 8)
    done = replay(each, Watching(TP8, budget=3, reach=HALF.reach), drafting(HALF))
    begun, tried, right, *_ = zip(*seen[1::2], strict=True)
    runs = np.sum(begun, axis=0)
    tried, right = (np.sum(x, axis=0)[OF_RUNS] for x in (tried, right))
    assert runs.sum() + right.sum() == pytest.approx(done.tokens, rel=0.05)
    # Each says 960 tokens, in runs of 1 / (1 - p): so many begin, and so many first tokens are right.
    begin = 960 * (1 - 0.8), 960 * (1 - 0.2)
    assert runs.sum() == pytest.approx(sum(begin), rel=0.03)
    assert right[3, 0] == pytest.approx(0.8 * begin[0] + 0.2 * begin[1], rel=0.03)


def test_every_sequence_has_an_acceptance_or_none_has():
    with pytest.raises(ValueError, match="every sequence has an acceptance"):
        replace(make_workload(1), accepts=[HALF])
