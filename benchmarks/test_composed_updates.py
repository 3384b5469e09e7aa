"""Composed updates against published training."""

from pathlib import Path

from benchmarks.composed_updates import POINTS, measure


def test_updates_are_near_published_training_and_faster_than_it():
    """With coefficients, which ship. Links, launches and what those programs compute less are in none."""
    found = measure(Path("nowhere"))
    assert len(found) == len(POINTS) == 4
    for beside in found:
        assert 0 < beside.error(beside.recomputing) < 35
        assert beside.keeping > beside.recomputing
    best = [x for x in found if x.source != "torchtitan"]
    assert all(x.error(x.recomputing) < 15 for x in best)
