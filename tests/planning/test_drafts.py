"""What drafts are worth against runs of tokens that are drawn and walked through one by one."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pat_jax.planning.draft_counts import BRANCHES, DRAFTS, GENERATED, KINDS, MAX_RUN, DraftResult
from pat_jax.planning.drafts import PRIOR_GENERATED, Acceptance

MANY = 1e9  # rows


@st.composite
def drafted(draw) -> DraftResult:
    """Of one burst; without a match nothing is right."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    proposed = rng.integers(0, 400, (2, KINDS, MAX_RUN)) * (rng.random((2, KINDS, MAX_RUN)) < 0.7)
    accepted = rng.binomial(proposed, rng.random((2, KINDS, 1)))
    accepted[:, 0] = 0
    begun, branch_counts = (
        rng.integers(0, 400, (n, KINDS)) * (rng.random((n, KINDS)) < 0.7) for n in (1, 7)
    )
    return DraftResult(begun[0], proposed, accepted, branch_counts, int(proposed.sum()))


bursts = st.lists(drafted(), max_size=4)


def seen(found: Sequence[DraftResult], acceptance: Acceptance | None = None) -> Acceptance:
    acceptance = acceptance or Acceptance.unseen()
    for one in found:
        acceptance = acceptance.observed(one)
    return acceptance


class Row:
    """Says what it has to, run after run; each token of a run is right with its kind's odds."""

    def __init__(
        self,
        rng: np.random.Generator,
        begin: np.ndarray,
        accepted: np.ndarray,
        of_branches: np.ndarray | None = None,
    ):
        """
        Args:
          begin: odds of the kinds of runs, float[kinds].
          accepted: odds of a token, by the kind.
          of_branches: the same of branches, of which runs have one of any kind; None: there are none.
        """
        self.rng, self.begin, self.accepted, self.of_branches = rng, begin, accepted, of_branches
        self.proposed, self.good = np.zeros((2, 2, KINDS, MAX_RUN), int)
        self.begun, self.branch_counts = np.zeros(KINDS, int), np.zeros((KINDS, KINDS), int)
        self._begin()

    def _begin(self) -> None:
        self.kind, self.place = int(self.rng.choice(KINDS, p=self.begin)), 0
        self.begun[self.kind] += 1
        self._look()

    def _look(self) -> None:
        """For a branch beside what comes next."""
        has_any = self.of_branches is not None and self.kind > 0
        self.beside = int(self.rng.integers(KINDS)) if has_any else 0

    def _is_right(self) -> bool:
        is_accepted = bool(self.rng.random() < self.accepted[self.kind])
        if self.place < MAX_RUN:
            self.proposed[DRAFTS, self.kind, self.place] += 1
            self.good[DRAFTS, self.kind, self.place] += is_accepted
        self.place += is_accepted
        return is_accepted

    def _on_branch(self, length: int) -> int:
        """Tokens of the branch that are right. Of the first one that is known, verified or not."""
        if not self.beside or self.of_branches is None:
            return 0
        for turn in range(max(length, 1)):
            is_accepted = bool(self.rng.random() < self.of_branches[self.beside])
            self.proposed[BRANCHES, self.beside, turn] += 1
            self.good[BRANCHES, self.beside, turn] += is_accepted
            if not is_accepted:
                return min(turn, length)
        return length

    def step(self, length: int, branch: int = 0) -> int:
        """The tokens that it says with so many of a draft and of a branch."""
        if self.kind:
            self.branch_counts[self.kind, self.beside] += 1
        for generated in range(1, length + 1):
            if not self._is_right():
                if generated == 1:
                    generated += self._on_branch(branch)
                self._begin()
                return generated
        if self._is_right():
            self._look()
            return length + 1
        generated = length + 1
        if not length:  # the draft's first token is drawn, verified or not
            generated += self._on_branch(branch)
        self._begin()
        return generated

    @property
    def drafted(self) -> DraftResult:
        return DraftResult(self.begun, self.proposed, self.good, self.branch_counts, 0)


def generated(
    rows: Sequence[Row], lengths: Callable[[Sequence[Row]], Sequence[Sequence[int]]], steps: int
) -> float:
    """Tokens of a step of a row, on average.

    Args:
      lengths: of each row's draft, and of its branch.
    """
    total = 0
    for _ in range(steps):
        total += sum(row.step(*n) for row, n in zip(rows, lengths(rows), strict=True))
    return total / steps / len(rows)


@given(bursts, st.sampled_from([1, 3, MANY]))
def test_more_room_says_no_less_and_no_step_says_more_than_its_room_and_one(found, rows):
    acceptance, draft = seen(found), 7
    tokens = np.array([acceptance.tokens(n, draft, rows) for n in range(draft + 1)])
    assert (np.diff(tokens) >= -1e-9).all()
    assert (tokens <= 1 + np.arange(draft + 1) + 1e-9).all() and (tokens >= 1 - 1e-9).all()


@pytest.mark.parametrize(("seed", "learned_with"), [(0, 3), (1, 7)])
def test_runs_drawn_from_known_odds_are_predicted_for_every_draft(seed, learned_with):
    """Learned with drafts of one length, and right of others too."""
    rng = np.random.default_rng(seed)
    begin = rng.dirichlet(np.full(KINDS, 3.0))
    accepted = np.array([0.0, *np.sort(rng.uniform(0.2, 0.85, KINDS - 1))])
    learner = Row(rng, begin, accepted)
    came = generated([learner], lambda rows: [[learned_with]], 30_000)
    acceptance = seen([learner.drafted])
    # Odds here do not rise along a run as those of texts do: at its far end the prior still counts.
    acceptance = without_branches(acceptance)
    assert acceptance.tokens(learned_with, learned_with, 1) == pytest.approx(came, rel=0.03)
    for draft in (1, 4, 8):
        came = generated([Row(rng, begin, accepted)], lambda rows, n=draft: [[n]], 20_000)
        assert acceptance.tokens(draft, draft, 1) == pytest.approx(came, rel=0.04)


# Odds of kinds of runs, and of tokens of a run and of a branch by the kind.
BEGIN = np.array([0.15, 0.25, 0.2, 0.15, 0.1, 0.1, 0.05])
RIGHT = np.array([0.0, 0.3, 0.45, 0.55, 0.65, 0.8, 0.9])
OF_BRANCHES = np.array([0.0, 0.2, 0.3, 0.5, 0.6, 0.7, 0.8])


@cache
def learned(has_branches: bool) -> Acceptance:
    row = new_row(np.random.default_rng(0), has_branches)
    generated([row], lambda rows: [[7, 7]], 30_000)
    return seen([row.drafted])


def new_row(rng: np.random.Generator, has_branches: bool) -> Row:
    return Row(rng, BEGIN, RIGHT, OF_BRANCHES if has_branches else None)


@pytest.mark.parametrize(
    ("branches", "count", "num_draft_tokens"),
    [(False, 1, 3), (False, 8, 1), (True, 1, 1), (True, 2, 3), (True, 8, 3)],
)
def test_rows_that_share_their_room_are_predicted(branches, count, num_draft_tokens):
    """The room of a step is given to the likeliest tokens of all rows, as `device/draft/token_batch.py` does."""
    rng, draft, acceptance = np.random.default_rng(2), 7, learned(branches)
    ahead = np.arange(1, draft + 1)

    def worth(row: Row) -> np.ndarray:
        own, accepted = OF_BRANCHES[row.beside] * branches, RIGHT[row.kind]
        value = np.concatenate([accepted**ahead, (1 - accepted) * own**ahead])
        value[np.argsort(-value, kind="stable")[draft:]] = 0  # of a row no more than a draft's
        return value

    def shared(rows: Sequence[Row]) -> list[tuple[int, int]]:
        value = np.concatenate([worth(row) for row in rows])
        order = np.argsort(-value, kind="stable")[: num_draft_tokens * len(rows)]
        chosen = np.bincount(order[value[order] > 0], minlength=len(value)) > 0
        of_row = chosen.reshape(len(rows), 2, draft).sum(axis=2)
        return [(a, b) for a, b in of_row.tolist()]

    came = generated([new_row(rng, branches) for _ in range(count)], shared, 24_000 // count)
    assert acceptance.tokens(num_draft_tokens, draft, count) == pytest.approx(came, rel=0.04)
    if branches and num_draft_tokens > 1:
        chains = without_branches(acceptance).tokens(num_draft_tokens, draft, count)
        assert acceptance.tokens(num_draft_tokens, draft, count) > 1.02 * chains


def without_branches(acceptance: Acceptance) -> Acceptance:
    return replace(acceptance, branch_counts=np.eye(1, KINDS) + np.zeros((KINDS, 1)))


def of_kind(kind: int, runs: int, accepted: int) -> DraftResult:
    """Runs of which so many tokens were right, and the next was not."""
    begun, (proposed, good) = np.zeros(KINDS, int), np.zeros((2, 2, KINDS, MAX_RUN), int)
    begun[kind], proposed[0, kind, : accepted + 1], good[0, kind, :accepted] = runs, runs, runs
    return DraftResult(begun, proposed, good, np.zeros((KINDS, KINDS), int), 0)


def test_a_change_of_policy_is_followed():
    good = seen([of_kind(3, 500, 5)] * 40)
    bad = seen([of_kind(3, 500, 0)] * 40, good)
    assert good.accept_prob[DRAFTS, 3, 4] > 0.9 and bad.accept_prob[DRAFTS, 3, 1] < 0.1
    assert good.tokens(4, 4, 1) > 3 > bad.tokens(4, 4, 1)


def test_a_model_is_taken_to_be_as_good_at_a_token_as_at_the_one_before_it():
    """Where short drafts have been verified alone, longer ones are believed in no less."""
    acceptance, before = Acceptance.unseen(is_generated=True), PRIOR_GENERATED
    np.testing.assert_allclose(
        acceptance.accept_prob[DRAFTS, GENERATED, :4], before ** np.arange(4)
    )
    begun, (proposed, accepted) = np.zeros(KINDS, int), np.zeros((2, 2, KINDS, MAX_RUN), int)
    branch_counts = np.zeros((KINDS, KINDS), int)
    begun[GENERATED] = proposed[DRAFTS, GENERATED, 0] = 10_000
    accepted[DRAFTS, GENERATED, 0] = 9_000
    first = acceptance.observed(DraftResult(begun, proposed, accepted, branch_counts, 10_000))
    np.testing.assert_allclose(
        first.accept_prob[DRAFTS, GENERATED, :4], 0.9 ** np.arange(4), rtol=1e-3
    )
    # And what is seen of the second one wins.
    proposed[DRAFTS, GENERATED, 1], accepted[DRAFTS, GENERATED, 1] = 9_000, 1_800
    both = first.observed(DraftResult(begun, proposed, accepted, branch_counts, 19_000))
    _, one, two = both.accept_prob[DRAFTS, GENERATED, :3]
    assert two / one == pytest.approx(0.2, rel=0.01)
    assert first.tokens(3, 3, 1) > 3.4 > 2.3 > both.tokens(3, 3, 1)


def test_what_fades_is_believed_as_before_anything_was_seen():
    """A run that begins without a match has no branch beside it, however many there are."""
    seen = Acceptance.unseen()
    begun, counts = np.full(KINDS, 20_000), np.zeros((2, KINDS, MAX_RUN), int)
    beside = np.diag(np.arange(KINDS) > 0) * 20_000
    for _ in range(10):
        seen = seen.observed(DraftResult(begun, counts, counts, beside, 1))
    assert not seen.branch_counts[0].any()
    assert np.isfinite(seen.tokens(np.array([1.0, 7.0]), 7, 4.0)).all()
