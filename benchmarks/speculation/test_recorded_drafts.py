"""What each sequence of a replay accepts: counted in recorded responses, drawn by length."""

import numpy as np
import pytest

from benchmarks.speculation.draft_counting import Group
from benchmarks.speculation.recorded_drafts import CLASSES, RecordedDrafts
from pat_jax.profiling.simulate.machine import Workload

DRAFT, CAP = 7, 4_096


def responses(rng: np.random.Generator, number: int) -> list[list[int]]:
    """The longer one is, the more often it says a phrase again."""
    phrase, texts = rng.integers(0, 1_000, 20).tolist(), []
    for _ in range(number):
        length, text = int(rng.integers(40, 600)), []
        while len(text) < length:
            again = rng.random() < length / 700
            text += phrase if again else rng.integers(1_000, 50_000, 20).tolist()
        texts.append(text[:length])
    return texts


@pytest.fixture(scope="module")
def recorded() -> RecordedDrafts:
    rng = np.random.default_rng(5)
    groups = [Group(f"{i}", [1, 2, 3], responses(rng, 4), []) for i in range(40)]
    return RecordedDrafts.counted(groups, DRAFT)


def workload(size: int, seed: int) -> Workload:
    lengths = np.random.default_rng(seed).lognormal(6, 1, size).astype(int)
    return Workload(np.full(size, 10), np.clip(lengths, 1, CAP), CAP)


def alone(accepts) -> np.ndarray:
    """Tokens in a step of rows alone."""
    return np.array([float(one.tokens(DRAFT, DRAFT, 1)) for one in accepts])


def test_classes_have_as_many_responses_and_are_worth_what_they_have_said(recorded):
    numbers = [recorded.accepts.count(one) for one in dict.fromkeys(recorded.accepts)]
    assert numbers == [len(recorded.accepts) // CLASSES] * CLASSES
    worth = alone(recorded.accepts)
    for one in set(worth):
        of_class = worth == one
        steps = recorded.lengths[of_class] / recorded.tokens[of_class]
        assert one == pytest.approx(recorded.lengths[of_class].sum() / steps.sum(), rel=0.12)
    assert (np.diff(worth[np.argsort(recorded.tokens, kind="stable")]) >= 0).all()


def test_draws_keep_the_mean_and_the_spread(recorded):
    drawn = np.concatenate([alone(recorded.draw(workload(400, i), i).accepts) for i in range(10)])
    worth = alone(recorded.accepts)
    assert drawn.mean() == pytest.approx(worth.mean(), rel=0.02)
    assert drawn.std() == pytest.approx(worth.std(), rel=0.05) and worth.std() > 0.2


def test_draws_keep_the_correlation_with_length(recorded):
    def correlated(lengths: np.ndarray, worth: np.ndarray) -> float:
        first, second = (
            np.argsort(np.argsort(x, kind="stable"), kind="stable") for x in (lengths, worth)
        )
        return float(np.corrcoef(first, second)[0, 1])

    known = correlated(recorded.lengths, alone(recorded.accepts))
    work = workload(2_000, 1)
    drawn = correlated(work.responses, alone(recorded.draw(work, 1).accepts))
    assert known > 0.4 and drawn == pytest.approx(known, abs=0.08)
