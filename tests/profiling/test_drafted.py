"""Replays with drafts: what rows say, what it takes, what the planner makes of it, and what drafts are worth."""

from dataclasses import replace

import numpy as np
import pytest
from drafting_machines import ALL, DRAFTS, HALF, NOTHING, acceptance_of, drafting
from fakes import SPLITS
from hypothesis import given, settings
from hypothesis import strategies as st
from replays import CAP, MACHINE, make_workload, queued, with_pools

from pat_jax.layout.buckets import Drafts
from pat_jax.planning.draft_counts import DRAFTS as OF_RUNS
from pat_jax.planning.draft_counts import GENERATED
from pat_jax.planning.drafts import Acceptance
from pat_jax.planning.lengths.model import LengthModel
from pat_jax.planning.planner.planner import CostModelPlanner
from pat_jax.planning.planner.scripts import FixedLayout, ScriptedPath, Step
from pat_jax.planning.types import Split
from pat_jax.profiling.simulate.draft_sources import OWN, SIBLINGS, DraftSource, generated
from pat_jax.profiling.simulate.machine import Workload
from pat_jax.profiling.simulate.simulator import replay

DP8, DP4TP2, DP2TP4, TP8 = SPLITS
ALIKE = Workload(np.full(16, 10), np.full(16, 120), CAP)  # two rows in each group of DP8
EVERY = MACHINE.check_every // 2  # steps between two tests of a burst with drafts
BELIEVED = HALF.accept_prob  # that none is worth nothing


def fixed(split: Split, num_draft_tokens: int) -> FixedLayout:
    return FixedLayout(split, num_draft_tokens=num_draft_tokens, accept_prob=BELIEVED)


def planner_of(machine, acceptance: Acceptance, splits=SPLITS) -> CostModelPlanner:
    lengths = LengthModel.empty(CAP).updated(
        make_workload(7, 500).responses, np.zeros(500, bool), None
    )
    drafts = {"acceptance": acceptance, "drafts": machine.drafts.limits}
    return CostModelPlanner(splits, machine.truth, lengths, memory=machine.memory, **drafts)


@pytest.mark.parametrize("split", [DP8, TP8], ids=str)
@pytest.mark.parametrize("num_draft_tokens", DRAFTS.num_draft_tokens)
def test_drafts_that_are_always_right_fill_the_room_of_a_step(split, num_draft_tokens):
    """Rows are full, so that there is room for as many of each; then by hand, 120 tokens of each."""
    machine = drafting(ALL)
    machine = replace(machine, buckets=replace(machine.buckets, lengths=(192,)))
    done = replay(ALIKE, fixed(split, num_draft_tokens), machine)
    steps = 120 // (1 + num_draft_tokens)
    whole = -(-steps // EVERY) * EVERY
    assert (done.decode_steps, done.busy_rows) == (whole, 16 * steps)
    step_s = machine.truth.verify_table[split, 16 // split.dp, 192, num_draft_tokens]
    assert done.spent("decode") == pytest.approx(whole * step_s)
    assert done.accepted == 16 * (120 - steps) == pytest.approx(done.drafted, abs=1)


def test_tokens_a_step_are_those_of_the_acceptance():
    """Where the planner believes what is true: of each row within a token."""
    truths = HALF, acceptance_of(0.7, 0.6), Acceptance.unseen(), generated(0.1), generated(0.8)
    for truth in truths:
        for num_draft_tokens in DRAFTS.num_draft_tokens:
            done = replay(
                ALIKE,
                FixedLayout(TP8, num_draft_tokens=num_draft_tokens, accept_prob=truth.accept_prob),
                drafting(truth),
            )
            rate = truth.tokens(num_draft_tokens, DRAFTS.longest, 16)
            steps = done.busy_rows / 16  # until a sequence has said its 120 tokens
            assert 119 <= rate * steps <= 121 + rate
            assert done.tokens == 16 * 120


def test_what_is_counted_is_what_planners_learn_from():
    """From beliefs of its own a planner comes to the truth, in tokens a step too."""
    truth = acceptance_of(0.7, 0.6)
    machine, planner = drafting(truth), None
    planner = planner_of(machine, Acceptance.unseen(), (TP8,))
    for seed in range(15):
        replay(make_workload(seed), planner, machine)
    assert planner.acceptance is not None
    learned = planner.acceptance
    for num_draft_tokens, rows in ((1, 8), (3, 8), (3, 1)):
        args = num_draft_tokens, DRAFTS.longest, rows
        assert learned.tokens(*args) == pytest.approx(truth.tokens(*args), rel=0.03)


kinds = st.builds(acceptance_of, st.floats(0, 1), st.just(0.9)) | st.builds(
    generated, st.floats(0.01, 0.99)
)


@given(queued, st.sampled_from(SPLITS), st.sampled_from(DRAFTS.num_draft_tokens), kinds)
def test_every_sequence_says_all_of_its_tokens_however_good_drafts_are(
    workload, split, num_draft_tokens, truth
):
    done = replay(workload, fixed(split, num_draft_tokens), drafting(truth))
    assert done.tokens == workload.responses.sum()
    assert len(done.trace.done_after) == workload.size
    assert done.busy_rows <= done.tokens <= (1 + DRAFTS.longest) * done.busy_rows
    assert done.total_s == pytest.approx(done.spent("prefill", "decode", "balance"))


@pytest.mark.slow  # `test_pools_and_balance.py` has it without drafts
@settings(deadline=None, max_examples=12)
@given(queued, st.integers(12, 40), st.booleans())
def test_everything_ends_in_pools_of_any_size(workload, pages, runs_ahead):
    workload = replace(workload, prompts=np.minimum(workload.prompts, 20))
    machine = replace(with_pools(drafting(HALF), pages), runs_ahead=runs_ahead)
    path = ScriptedPath(
        DP8, (Step(TP8, 12), Step(DP2TP4, 5)), num_draft_tokens=1, accept_prob=BELIEVED
    )
    for planner in (fixed(TP8, 3), fixed(DP8, 1), path, planner_of(machine, HALF)):
        assert replay(workload, planner, machine).tokens == workload.responses.sum()


@pytest.mark.parametrize("num_draft_tokens", DRAFTS.num_draft_tokens)
def test_each_sequence_goes_on_as_fast_as_its_own_drafts_are_right(num_draft_tokens):
    """By hand: of 16 that generate 120 tokens half get everything right, and half nothing."""
    accepts = [ALL, NOTHING] * 8
    done = replay(replace(ALIKE, accepts=accepts), fixed(TP8, num_draft_tokens), drafting(HALF))
    assert done.tokens == 16 * 120
    # Rows that the first have left are room for the others: of those nothing more comes.
    fast, slow = 120 // (1 + num_draft_tokens), 120
    assert done.busy_rows == 8 * (fast + slow)
    assert done.decode_steps == -(-slow // EVERY) * EVERY


class TestGenerated:
    """Drafts that a model says: every row's is as long as the budget, and a run of its own."""

    @pytest.mark.parametrize("accepted", [0.5, 0.8])
    def test_planners_come_to_the_truth_and_foretell_what_is_said(self, accepted):
        machine = drafting(generated(accepted), dearer=1.02)
        planner = planner_of(machine, Acceptance.unseen(is_generated=True))
        for seed in range(5):
            replay(make_workload(seed), planner, machine)
        done = replay(make_workload(5), planner, machine)
        assert done.drafts.steps > 0.9 * done.decode_steps
        assert done.drafts.tokens == pytest.approx(done.drafts.expected_tokens, rel=0.02)
        assert planner.acceptance is not None
        learned = planner.acceptance
        np.testing.assert_allclose(
            learned.accept_prob[OF_RUNS, GENERATED, 1:4], accepted ** np.arange(1, 4), rtol=0.03
        )


class TestPlanner:
    workload = make_workload(5)

    def undrafted_s(self, machine) -> float:
        planner = replace(planner_of(machine, Acceptance.unseen()), acceptance=None)
        return replay(self.workload, planner, machine).total_s

    def test_drafts_where_they_pay(self):
        machine = drafting(acceptance_of(0.8), dearer=1.05)
        drafted = replay(self.workload, planner_of(machine, Acceptance.unseen()), machine)
        assert {burst.num_draft_tokens for burst in drafted.bursts} <= set(DRAFTS.num_draft_tokens)
        assert drafted.total_s < 0.7 * self.undrafted_s(machine)

    def test_and_not_where_they_do_not(self):
        """It believes at first that they are worth something, and learns that they are not."""
        machine = drafting(NOTHING, dearer=1.05)
        planner = planner_of(machine, Acceptance.unseen())
        first = replay(self.workload, planner, machine)
        for seed in range(5):
            replay(make_workload(seed), planner, machine)
        later = replay(self.workload, planner, machine)
        share = [
            np.mean([burst.num_draft_tokens > 0 for burst in done.bursts])
            for done in (first, later)
        ]
        assert share[0] > share[1] < 0.2
        assert later.total_s < 1.05 * self.undrafted_s(machine)


COPIED = Drafts(num_draft_tokens=(7,), longest=7, most_tokens=64, texts=4)


def test_the_built_in_ones_say_where_they_are_from():
    own, siblings = (DraftSource.built_in(COPIED, samples) for samples in (1, 8))
    assert (own.name, siblings.name) == (OWN, SIBLINGS)
    # As benchmarks/results/draft_acceptance.json has the mean of seven models: 1.83 and 2.03.
    assert own.alone(8) == pytest.approx(1.83, rel=0.05)
    assert siblings.alone(8) == pytest.approx(2.03, rel=0.05)
    assert siblings.alone(8) == float(Acceptance.unseen().tokens(8, 8, 1))
    origin, alone = siblings.words(7)
    assert "1,261 responses of seven models" in origin and "of a run has yours" in origin
    assert "tokens a step with drafts of 7 from own text, siblings." in alone


def test_rollouts_without_room_or_samples_have_their_own_text_alone():
    for drafts, samples in ((COPIED, 1), (replace(COPIED, texts=0), 8)):
        assert DraftSource.built_in(drafts, samples).name == OWN
