"""Rows that wait, beside the lockstep of all."""

from dataclasses import replace

import numpy as np
import pytest

from benchmarks.draft_acceptance import SOURCES
from benchmarks.staggered_samples import Queued
from pat_jax.profiling.simulate.draft_counting import Group, Record, verify

RULES = replace(SOURCES["own, siblings as of launch"], draft=3)


def record_of(seed: int, samples: int = 4) -> Record:
    """Texts of few words, some of which siblings share."""
    rng, groups = np.random.default_rng(seed), []
    for name in "abc":
        said = rng.integers(0, 9, 400).tolist()
        texts = [
            [*rng.integers(0, 9, rng.integers(1, 40)).tolist(), *said[: rng.integers(1, 400)]]
            for _ in range(samples)
        ]
        groups.append(Group(name, rng.integers(0, 9, 5).tolist(), texts, []))
    return Record(groups, 16)


@pytest.mark.parametrize("seed", range(4))
def test_with_a_row_for_each_it_is_the_lockstep(seed: int):
    record = record_of(seed)
    steps = verify(record, RULES)
    order = np.random.default_rng(seed).permutation(record.rows)
    found = Queued(record, RULES, order, record.rows).counted()
    assert found == (len(steps), steps.step.max() + 1)


@pytest.mark.parametrize("rows", [1, 3])
def test_there_are_never_more_rows_and_all_responses_end(rows: int):
    record = record_of(5)
    queued = Queued(record, RULES, np.arange(record.rows), rows)
    row_steps, steps = queued.counted()
    assert (queued.at == queued.whole).all() and not len(queued.waiting)
    assert row_steps <= rows * steps
    if rows == 1:  # an end of each burst, and of each response
        assert row_steps == steps


def test_a_response_that_is_skipped_is_whole_for_its_siblings():
    """Equal texts: the second one copies all of it, but for the first words."""
    text = np.random.default_rng(0).integers(0, 10**6, 200).tolist()
    record = Record([Group("a", [1, 2, 3], [text, text], [])], 16)
    alone, behind = (Queued(record, RULES, np.array([1]), 1) for _ in range(2))
    behind.skip(np.array([0]))
    assert alone.counted()[0] == 200
    assert behind.counted()[0] == 200 // 4
