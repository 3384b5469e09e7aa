"""What `speculation_replay` works out itself: its sums."""

from benchmarks.speculation.speculation_cells import (
    ADAPTIVE,
    BUDGETED,
    INFORMED,
    ONE_NUMBER,
    PLANNED,
    STATICS,
)
from benchmarks.speculation.speculation_replay import summary


def test_speed_ups_are_over_the_best_static_layout_of_each_replay():
    seconds = {
        **{name: [20.0, 20.0] for name in STATICS},
        STATICS[0]: [10.0, 30.0],
        STATICS[1]: [30.0, 12.0],
        **{name: [8.0, 8.0] for name in BUDGETED},
        **{name: [5.5, 9.0] for name in ONE_NUMBER},
        ONE_NUMBER[1]: [6.0, 6.0],
        ADAPTIVE: [9.0, 12.0],
        PLANNED: [5.0, 6.0],
        INFORMED: [5.0, 5.0],
    }
    found = summary(seconds)
    assert found["speed_up"][PLANNED]["mean"] == found["speed_up"][PLANNED]["max"] == 2.0
    fixed = found["speed_up_of_the_best_static_with_a_fixed_budget"]
    assert fixed == {
        "mean": 1.375,
        "min": 1.25,
        "lower_quartile": 1.312,
        "median": 1.375,
        "upper_quartile": 1.438,
        "max": 1.5,
    }
    assert found["planned_over_adaptive"]["min"] == 1.8
    assert found["planned_over_the_best_static_with_a_fixed_budget"]["max"] == 1.6
    assert found["planned_over_the_best_one_budget"]["mean"] == 1.05
