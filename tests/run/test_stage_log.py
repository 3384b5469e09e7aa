"""The stages of an iteration: on which devices, and how long."""

import logging
import time
from concurrent.futures import ThreadPoolExecutor

import jax
import pytest

from pat_jax.common.timeline import Timeline, recorded, stage
from pat_jax.config.command_line import parse
from pat_jax.run.logging.stage_log import log_stages
from pat_jax.run.roles.places import Places

DEVICES = jax.devices()[:4]
FIRST, SECOND = DEVICES[:2], DEVICES[2:]


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


def test_the_log_has_the_seconds_of_each_stage(timeline: Timeline, caplog):
    places = Places.of(parse(("--placement", "separate")).placement, DEVICES)
    with caplog.at_level(logging.INFO):
        seconds = log_stages(timeline, places, 3)
    assert caplog.messages == [
        "step 3: rollout 10 s, scores of the reward model 3 s, update of the policy 2 s, "
        "weights to the rollout 2 s"
    ]
    assert seconds["scores of the reward model"] == pytest.approx(3.0)
    assert log_stages(timeline, places, 4) == {}


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
