"""The stages of an iteration: on which devices, how long, and drawn."""

import json
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import jax
import pytest

from pat_jax.common.timeline import Timeline, recorded, stage
from pat_jax.planning.placement import Placement
from pat_jax.run.logging.iteration_picture import (
    IterationStages,
    PlacedSpan,
    draw_iteration,
    plot_iteration,
)

DEVICES = jax.devices()[:4]
FIRST, SECOND = DEVICES[:2], DEVICES[2:]


def stages_of(timeline: Timeline, predicted_s: dict[str, float] | None = None) -> IterationStages:
    groups = Placement.named("separate", 4).groups()
    return IterationStages.of(3, timeline.take(), DEVICES, groups, predicted_s or {})


@pytest.fixture
def timeline() -> Timeline:
    """Of an iteration whose scores are read while others are generated."""
    found = Timeline()
    found.add("update of the policy", SECOND, 116.0, 118.0)
    found.add("rollout", FIRST, 100.0, 110.0)
    found.add("scores of the reward model", SECOND, 104.0, 106.0)
    found.add("scores of the reward model", SECOND, 110.0, 111.0)
    found.add("log-probabilities of the policy", SECOND, 111.0, 111.001)
    found.add("weights to the rollout", DEVICES, 118.0, 120.0)
    return found


def test_stages_are_on_their_devices_since_the_first_began(timeline: Timeline):
    found = stages_of(timeline)
    assert found.groups == [(0, 1), (2, 3)]
    assert found.spans[0] == PlacedSpan("rollout", (0, 1), 0.0, 10.0)
    assert found.spans[-1] == PlacedSpan("weights to the rollout", (0, 1, 2, 3), 18.0, 20.0)
    assert len(found.spans) == 5, "what takes no visible time is left out"
    assert found.seconds["scores of the reward model"] == pytest.approx(3.0)


def test_predicted_seconds_are_beside_the_measured_ones(timeline: Timeline):
    predicted = {"rollout": 9.0, "gradients of the policy": 1.5, "step of the policy": 0.25}
    assert stages_of(timeline, predicted).described() == (
        "rollout 10 s (predicted 9), scores of the reward model 3 s, "
        "update of the policy 2 s (predicted 1.75), weights to the rollout 2 s"
    )


def test_each_group_of_devices_is_a_row_of_the_picture(timeline: Timeline, tmp_path: Path):
    found = stages_of(timeline)
    (axes,) = draw_iteration(found).axes
    assert [x.get_text() for x in axes.get_yticklabels()] == ["devices 0-1", "devices 2-3"]
    assert len(axes.collections) == 2 + 4, "the weights have both rows"
    plot_iteration(found, tmp_path / "iteration.png", {"hosts": 1})
    kept = json.loads((tmp_path / "iteration.json").read_text())
    assert kept["step"] == 3 and len(kept["spans"]) == 5 and kept["hosts"] == 1


def test_stages_of_all_threads_are_recorded_until_they_are_taken():
    def read() -> None:
        with stage("scores", SECOND):
            time.sleep(0.01)

    with recorded() as timeline:
        with stage("rollout", FIRST), ThreadPoolExecutor(1) as lane:
            lane.submit(read).result()
        rollout, scores = timeline.take()
        assert (rollout.name, scores.name) == ("rollout", "scores") and scores.devices == {*SECOND}
        assert scores.end_s - scores.begin_s >= 0.01
        assert rollout.begin_s <= scores.begin_s < scores.end_s <= rollout.end_s
        assert timeline.take() == []
    with stage("rollout", FIRST):
        pass
    assert timeline.take() == []
