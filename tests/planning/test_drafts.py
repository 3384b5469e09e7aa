"""What drafts are worth against runs of tokens that are drawn and walked through one by one."""

from collections.abc import Callable, Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pat_jax.planning.drafts import (
    BEGUN_HALVE,
    KINDS,
    MOST,
    NONE_DRAFTED,
    PRIOR,
    PRIOR_BEGUN,
    PRIOR_SAID,
    SAID,
    Acceptance,
    Drafted,
)

MANY = 1e9  # rows


@st.composite
def drafted(draw) -> Drafted:
    """Of one burst; without a match nothing is right."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    tried = rng.integers(0, 400, (KINDS, MOST)) * (rng.random((KINDS, MOST)) < 0.7)
    right = rng.binomial(tried, rng.random((KINDS, 1)))
    right[0] = 0
    begun = rng.integers(0, 400, KINDS) * (rng.random(KINDS) < 0.7)
    return Drafted(begun, tried, right, int(tried.sum()))


bursts = st.lists(drafted(), max_size=4)


def seen(found: Sequence[Drafted], acceptance: Acceptance | None = None) -> Acceptance:
    acceptance = acceptance or Acceptance.unseen()
    for one in found:
        acceptance = acceptance.observed(one)
    return acceptance


class Row:
    """Says what it has to, run after run; each token of a run is right with its kind's odds."""

    def __init__(self, rng: np.random.Generator, begin: np.ndarray, right: np.ndarray):
        self.rng, self.begin, self.right = rng, begin, right
        self.counts = np.zeros((2, KINDS, MOST), int)
        self.begun = np.zeros(KINDS, int)
        self._begin()

    def _begin(self) -> None:
        self.kind, self.place = int(self.rng.choice(KINDS, p=self.begin)), 0
        self.begun[self.kind] += 1

    def _is_right(self) -> bool:
        is_right = bool(self.rng.random() < self.right[self.kind])
        if self.place < MOST:
            self.counts[:, self.kind, self.place] += 1, is_right
        self.place += is_right
        return is_right

    def step(self, length: int) -> int:
        """The tokens that it says with so many of a draft."""
        for said in range(1, length + 1):
            if not self._is_right():
                self._begin()
                return said
        if not self._is_right():
            self._begin()
        return length + 1

    @property
    def drafted(self) -> Drafted:
        tried, right = self.counts
        return Drafted(self.begun, tried, right, 0)


def said(
    rows: Sequence[Row], lengths: Callable[[Sequence[Row]], Sequence[int]], steps: int
) -> float:
    """Tokens of a step of a row, on average."""
    total = 0
    for _ in range(steps):
        total += sum(row.step(n) for row, n in zip(rows, lengths(rows), strict=True))
    return total / steps / len(rows)


@given(bursts, st.integers(1, 9))
def test_a_step_without_room_for_drafts_says_one_token(found, draft):
    for rows in (1, 4, MANY):
        assert seen(found).tokens(0, draft, rows) == pytest.approx(1.0)


@given(bursts, st.sampled_from([1, 3, MANY]))
def test_more_room_says_no_less_and_no_step_says_more_than_its_room_and_one(found, rows):
    acceptance, draft = seen(found), 7
    tokens = np.array([acceptance.tokens(n, draft, rows) for n in range(draft + 1)])
    assert (np.diff(tokens) >= -1e-9).all()
    assert (tokens <= 1 + np.arange(draft + 1) + 1e-9).all() and (tokens >= 1 - 1e-9).all()


@given(bursts)
def test_room_that_is_shared_is_worth_no_less(found):
    """What is likeliest right is verified first."""
    acceptance = seen(found)
    for budget in (1, 3, 7):
        shared, alone = (acceptance.tokens(budget, 7, rows) for rows in (MANY, 1))
        assert shared >= 0.97 * alone  # between two bars of a table


@given(bursts)
def test_runs_that_did_not_happen_change_nothing(found):
    acceptance = seen(found)
    begun, tried, right, *_ = (x[0] for x in NONE_DRAFTED)
    after = acceptance.observed(Drafted(begun, tried, right, 0))
    for name in ("begun", "tried", "right"):
        np.testing.assert_array_equal(getattr(after, name), getattr(acceptance, name))


def test_before_anything_is_seen_it_is_what_was_counted():
    reach = Acceptance.unseen().reach
    assert (reach[:, 0] == 1).all() and (reach[0, 1:] == 0).all()
    for kind, rates in enumerate(PRIOR, start=1):
        np.testing.assert_allclose(reach[kind, 1 : 1 + len(rates)], np.cumprod(rates))
    assert sum(PRIOR_BEGUN) == pytest.approx(1.0, abs=0.01)


@pytest.mark.parametrize("learned_with", [3, 7])
@pytest.mark.parametrize("seed", range(3))
def test_runs_drawn_from_known_odds_are_foretold_for_every_draft(seed, learned_with):
    """Learned with drafts of one length, and right of others too."""
    rng = np.random.default_rng(seed)
    begin = rng.dirichlet(np.full(KINDS, 3.0))
    right = np.array([0.0, *np.sort(rng.uniform(0.2, 0.85, KINDS - 1))])
    learner = Row(rng, begin, right)
    came = said([learner], lambda rows: [learned_with], 30_000)
    acceptance = seen([learner.drafted])
    # Odds here do not rise along a run as those of texts do, and few come to its far end: there what was
    # expected before still counts.
    assert acceptance.tokens(learned_with, learned_with, 1) == pytest.approx(came, rel=0.03)
    for draft in (1, 2, 4, 8):
        came = said([Row(rng, begin, right)], lambda rows, n=draft: [n], 20_000)
        assert acceptance.tokens(draft, draft, 1) == pytest.approx(came, rel=0.04)


@pytest.mark.parametrize("budget", [1, 3])
@pytest.mark.parametrize("count", [1, 2, 8])
def test_rows_that_share_their_room_are_foretold(count, budget):
    """The room of a step is given to the likeliest tokens of all rows, as `device/lines.py` does."""
    rng, draft = np.random.default_rng(0), 7
    begin = np.array([0.15, 0.25, 0.2, 0.15, 0.1, 0.1, 0.05])
    right = np.array([0.0, 0.3, 0.45, 0.55, 0.65, 0.8, 0.9])
    learner = Row(rng, begin, right)
    said([learner], lambda rows: [draft], 30_000)
    acceptance = seen([learner.drafted])

    def shared(rows: Sequence[Row]) -> list[int]:
        value = np.array([right[row.kind] ** np.arange(1, draft + 1) for row in rows])
        order = np.argsort(-value, axis=None, kind="stable")[: budget * len(rows)]
        lengths = np.bincount(order // draft, minlength=len(rows))
        return [n if row.kind else 0 for n, row in zip(lengths.tolist(), rows, strict=True)]

    came = said([Row(rng, begin, right) for _ in range(count)], shared, 24_000 // count)
    assert acceptance.tokens(budget, draft, count) == pytest.approx(came, rel=0.04)


def of_kind(kind: int, runs: int, right: int) -> Drafted:
    """Runs of which so many tokens were right, and the next was not."""
    begun, (tried, good) = np.zeros(KINDS, int), np.zeros((2, KINDS, MOST), int)
    begun[kind], tried[kind, : right + 1], good[kind, :right] = runs, runs, runs
    return Drafted(begun, tried, good, 0)


def test_a_change_of_kinds_is_followed_within_their_half_life():
    before = seen([of_kind(0, 10_000, 0)])
    assert before.tokens(4, 4, 1) == pytest.approx(1.0, abs=1e-6)
    runs = int(BEGUN_HALVE)
    after = before.observed(of_kind(1, runs, 1))
    assert after.begun[0] / before.begun[0] == pytest.approx(0.5)
    assert after.begun[1] - before.begun[1] / 2 == pytest.approx(runs)
    far = seen([of_kind(1, runs, 1)] * 20, before)
    assert far.begun[0] < 1e-4 * far.begun[1]


def test_a_change_of_policy_is_followed():
    good = seen([of_kind(3, 500, 5)] * 40)
    bad = seen([of_kind(3, 500, 0)] * 40, good)
    assert good.reach[3, 4] > 0.9 and bad.reach[3, 1] < 0.1
    assert good.tokens(4, 4, 1) > 3 > bad.tokens(4, 4, 1)


def test_a_model_is_taken_to_be_as_good_at_a_token_as_at_the_one_before_it():
    """Where short drafts have been verified alone, longer ones are believed in no less."""
    acceptance, before = Acceptance.unseen(is_said=True), PRIOR_SAID
    np.testing.assert_allclose(acceptance.reach[SAID, :4], before ** np.arange(4))
    begun, (tried, right) = np.zeros(KINDS, int), np.zeros((2, KINDS, MOST), int)
    begun[SAID] = tried[SAID, 0] = 10_000
    right[SAID, 0] = 9_000
    first = acceptance.observed(Drafted(begun, tried, right, 10_000))
    np.testing.assert_allclose(first.reach[SAID, :4], 0.9 ** np.arange(4), rtol=1e-3)
    # And what is seen of the second one wins.
    tried[SAID, 1], right[SAID, 1] = 9_000, 1_800
    both = first.observed(Drafted(begun, tried, right, 19_000))
    assert both.reach[SAID, 2] / both.reach[SAID, 1] == pytest.approx(0.2, rel=0.01)
    assert first.tokens(3, 3, 1) > 3.4 > 2.3 > both.tokens(3, 3, 1)
