"""Rollouts of real lengths in pools that are too small: never far behind the best static layout."""

import pytest

from benchmarks.planner.hard_cells import Pressed, outcome
from tests.published import DATA, needs_data

CELLS = (  # before pools were priced these were far behind
    Pressed("llama-3.1-8b", 512, "math", 3.0),
    Pressed("llama-3.1-8b", 512, "code", 10.0),
    Pressed("llama-3.1-8b", 512, "r1", 3.0),
    Pressed("llama-3.1-8b", 1024, "r1", 10.0),
)


@needs_data
@pytest.mark.slow
@pytest.mark.parametrize("cell", CELLS, ids=str)
def test_it_is_close_to_the_best_static_layout_with_few_switches(cell):
    done = outcome(cell.trial(DATA, seed=0))
    assert done.loss <= 0.05 and done.switches <= 10
