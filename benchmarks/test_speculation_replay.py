"""What `speculation_replay` works out itself: truths as good as counted, and its sums."""

import numpy as np
import pytest

from benchmarks.speculation_cells import (
    ADAPTIVE,
    BUDGETED,
    CLAIRVOYANT,
    COUNTED,
    COUNTED_DRAFT,
    INFORMED,
    PLANNED,
    STATICS,
    of_chains,
    truth_of,
)
from benchmarks.speculation_replay import summary
from pat_jax.planning.drafts import KINDS, Acceptance


@pytest.mark.parametrize("tokens", COUNTED.values())
def test_a_truth_says_as_many_tokens_a_step_as_were_counted(tokens: float):
    truth, unseen, size = truth_of(tokens), Acceptance.unseen(), (COUNTED_DRAFT, COUNTED_DRAFT, 1)
    assert of_chains(truth).tokens(*size) == pytest.approx(tokens, abs=1e-6)
    np.testing.assert_allclose(truth.share, unseen.share)
    better = tokens > of_chains(unseen).tokens(*size)
    for kind in range(1, KINDS):
        assert ((truth.reach[:, kind, 1] > unseen.reach[:, kind, 1]) == better).all()


def test_speed_ups_are_over_the_best_static_layout_of_each_replay():
    fixed = {name: [8.0, 8.0] for name in BUDGETED}
    seconds = {
        **{name: [20.0, 20.0] for name in STATICS},
        STATICS[0]: [10.0, 30.0],
        STATICS[1]: [30.0, 12.0],
        **fixed,
        ADAPTIVE: [9.0, 12.0],
        PLANNED: [5.0, 6.0],
        INFORMED: [5.0, 5.0],
        CLAIRVOYANT: [5.0, 5.0],
    }
    found = summary(seconds)
    assert found["speed_up"][PLANNED] == {"mean": 2.0, "worst": 2.0}
    assert found["speed_up_of_the_best_static_with_a_fixed_budget"]["mean"] == 1.375
    assert found["regret_percent"] == {"mean": 10.0, "worst": 20.0}
    assert found["planned_over_adaptive"]["worst"] == 1.8
