"""What drafts are worth against runs of tokens that are drawn and walked through one by one."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pat_jax.planning.drafts import (
    KINDS_HALVE,
    MATCHES,
    MOST,
    NONE_DRAFTED,
    PRIOR,
    PRIOR_KINDS,
    Acceptance,
)

NUM_KINDS = 1 + len(MATCHES)
SHORTEST = (0, *MATCHES)  # match of each kind


@st.composite
def counts(draw) -> np.ndarray:
    """Of one burst: steps by kind and tokens accepted; without a match none are."""
    draft = draw(st.integers(1, 9))
    cells = st.lists(st.integers(0, 400), min_size=draft + 1, max_size=draft + 1)
    found = np.array([draw(cells) for _ in range(NUM_KINDS)])
    found[0, 1:] = 0
    return found


bursts = st.lists(counts(), max_size=4)


def seen(found, acceptance: Acceptance | None = None) -> Acceptance:
    acceptance = acceptance or Acceptance.unseen()
    for one in found:
        acceptance = acceptance.observed(one)
    return acceptance


def walked(rng: np.random.Generator, begin: np.ndarray, right: np.ndarray, draft: int, runs: int):
    """Counts and the mean tokens of the steps of many runs, each token drawn for itself.

    Args:
      begin: P(a run begins with a match of each kind).
      right: P(a token of a run is right | those before it are), by the kind that it began with.
    """
    found, said = np.zeros((NUM_KINDS, 1 + draft), int), 0
    for kind in rng.choice(NUM_KINDS, size=runs, p=begin):
        at = 0  # tokens of the run that have been said
        is_on = True
        while is_on:
            met = sum(SHORTEST[kind] + at >= x for x in MATCHES) if kind else 0
            accepted = 0
            while accepted < draft and (is_on := rng.random() < right[kind]):
                accepted += 1
            found[met, accepted] += 1
            said += accepted + 1
            if is_on:  # the step says one more; the run goes on if that is what it has next
                is_on = rng.random() < right[kind]
            at += accepted + 1
    return found, said / found.sum()


@given(bursts)
def test_a_step_without_a_draft_says_one_token(found):
    acceptance = seen(found)
    assert acceptance.tokens(0) == pytest.approx(1.0)
    np.testing.assert_allclose(acceptance.by_kind(0), 1.0)


@given(bursts)
def test_longer_drafts_say_no_less_and_no_step_says_more_than_its_draft_and_one(found):
    acceptance = seen(found)
    tokens = np.array([acceptance.tokens(n) for n in range(MOST + 1)])
    assert (np.diff(tokens) >= -1e-9).all()
    assert (tokens <= 1 + np.arange(MOST + 1) + 1e-9).all()
    by_kind = np.array([acceptance.by_kind(n) for n in range(MOST + 1)])
    assert (np.diff(by_kind, axis=0) >= 0).all()
    assert (by_kind <= 1 + np.arange(MOST + 1)[:, None]).all()
    np.testing.assert_allclose(by_kind[:, 0], 1.0)  # without a match there is no draft


@given(bursts, st.integers(0, 9))
def test_nothing_seen_changes_nothing(found, draft):
    acceptance = seen(found)
    assert acceptance.observed(np.zeros((NUM_KINDS, 1 + draft), int)) is acceptance
    assert acceptance.observed(NONE_DRAFTED[0]) is acceptance
    undrafted = NONE_DRAFTED[0] + 7  # steps of a burst without drafts
    assert acceptance.observed(undrafted) is acceptance


def test_before_anything_is_seen_it_is_what_was_counted():
    """Drafts as long as those of the counts, whose kinds and rates are the prior's."""
    acceptance, draft = Acceptance.unseen(), len(PRIOR[0])
    for kind, rates in enumerate(PRIOR, start=1):
        said = 1 + sum(np.prod(rates[:n]) for n in range(1, draft + 1))
        assert acceptance.by_kind(draft)[kind] == pytest.approx(said)
    mean = np.array(PRIOR_KINDS) @ acceptance.by_kind(draft)
    assert acceptance.tokens(draft) == pytest.approx(mean, rel=0.03)


@pytest.mark.parametrize("learned_with", [3, 7])
@pytest.mark.parametrize("seed", range(3))
def test_runs_drawn_from_known_odds_are_foretold_for_every_draft(seed, learned_with):
    rng = np.random.default_rng(seed)
    begin = rng.dirichlet(np.full(NUM_KINDS, 3.0))
    right = np.array([0.0, *np.sort(rng.uniform(0.2, 0.85, len(MATCHES)))])
    found, came = walked(rng, begin, right, learned_with, runs=40_000)
    acceptance = seen([found] * 5)  # which runs there are shows from burst to burst
    assert acceptance.tokens(learned_with) == pytest.approx(came, rel=0.02)
    for draft in (1, 2, 4, 8):
        _, came = walked(rng, begin, right, draft, runs=20_000)
        # Odds here do not rise along a run as those of texts do, on which longer drafts have to rely.
        within = 0.02 if draft <= learned_with + 1 else 0.04
        assert acceptance.tokens(draft) == pytest.approx(came, rel=within)


def test_steps_of_all_lengths_tell_of_the_same_runs():
    rng = np.random.default_rng(0)
    begin = np.full(NUM_KINDS, 1 / NUM_KINDS)
    right = np.array([0.0, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8])
    short, long = (walked(rng, begin, right, n, runs=20_000)[0] for n in (2, 7))
    # Short drafts meet longer matches: as shares of the steps these are other kinds.
    assert short[-1].sum() / short.sum() > 1.1 * long[-1].sum() / long.sum()
    expected = seen([long] * 5)
    mixed = expected.among(short)
    for draft in (1, 4, 8):
        assert mixed.tokens(draft) == pytest.approx(expected.tokens(draft), rel=0.02)
    np.testing.assert_array_equal(mixed.by_kind(8), expected.by_kind(8))


def of_kind(kind: int, steps: int, accepted: int, draft: int = 4) -> np.ndarray:
    found = np.zeros((NUM_KINDS, 1 + draft), int)
    found[kind, accepted] = steps
    return found


def test_a_change_of_kinds_is_followed_within_their_half_life():
    before = seen([of_kind(0, 10_000, 0)])
    assert before.tokens(4) == pytest.approx(1.0, abs=1e-6)
    steps = int(KINDS_HALVE)
    after = before.observed(of_kind(1, steps, 1))
    gone, come = after.begun[0] / before.begun[0], after.begun[1] - before.begun[1] / 2
    assert gone == pytest.approx(0.5)
    assert come == pytest.approx(steps)  # all runs begin with it: none goes on
    far = seen([of_kind(1, steps, 1)] * 20, before)
    assert far.begun[0] < 1e-4 * far.begun[1]


def test_a_change_of_policy_is_followed():
    kind, draft = 3, 4
    good = seen([of_kind(kind, 500, draft)] * 40)
    bad = seen([of_kind(kind, 500, 0)] * 40, good)
    assert good.by_kind(draft)[kind] > 4.5
    assert bad.by_kind(draft)[kind] < 1.1


def test_tokens_that_no_draft_had_are_as_good_as_those_before_them():
    """Where drafts of 3 are better than expected, so are longer ones."""
    kind = 2
    rates = np.array([0.8, 0.85, 0.9])
    reached = 1000 * np.cumprod([1.0, *rates])
    found = np.zeros((NUM_KINDS, 4), int)
    found[kind] = np.round(-np.diff([*reached, 0.0]))
    longer = Acceptance.unseen().observed(found).by_kind(8)[kind]
    prior = 1 + sum(np.prod([*rates, *PRIOR[kind - 1][3:n]]) for n in range(4, 9))
    prior += np.cumprod(rates).sum()
    assert longer > 1.05 * prior
