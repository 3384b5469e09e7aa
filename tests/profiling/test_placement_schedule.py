"""When the stages of an iteration run, against schedules worked out by hand."""

from dataclasses import replace

import numpy as np
import pytest

from pat_jax.planning.stage_names import ROLLOUT
from pat_jax.profiling.placement.iteration import Iteration, Schedule, Stage
from pat_jax.profiling.placement.schedule import scheduled

ALL, FIRST, SECOND = (0, 1), (0,), (1,)
READ = Stage("read", SECOND, (3.0, 2.0))
LEARN = Stage("learn", SECOND, (2.0, 2.0), ("read",))
STEP = Stage("step", SECOND, (1.0,), ("learn",))
TRANSFER = Stage("transfer", ALL, (0.5,), ("step",))


def with_rollout(*stages: Stage, devices: tuple[int, ...] = FIRST) -> Schedule:
    return scheduled(Iteration(devices, 10.0, stages))


# Responses end after 4 and 10 seconds. 4-7 read, 7-9 learn, 10-12 read, 12-14 learn.
EARLY_READ, EARLY_LEARN = replace(READ, ready_s=(4.0, 10.0)), replace(LEARN, ready_s=(7.0, 12.0))


def times(found: Schedule) -> dict[str, tuple[float, float]]:
    return {span.name: (span.begin_s, span.end_s) for span in found.spans}


def test_stages_on_all_devices_follow_one_another():
    everywhere = [replace(x, devices=ALL) for x in (READ, LEARN, STEP, TRANSFER)]
    found = with_rollout(*everywhere, devices=ALL)
    assert found.seconds == 10 + 5 + 4 + 1 + 0.5
    assert found.path == {ROLLOUT: 10, "read": 5, "learn": 4, "step": 1, "transfer": 0.5}
    assert found.bound == ROLLOUT and found.busy_s(0) == found.seconds


@pytest.mark.parametrize(
    ("stages", "expected"),
    [
        ((READ, LEARN), {"read": (10, 15), "learn": (15, 19)}),
        ((EARLY_READ, LEARN), {"read": (4, 12), "learn": (12, 16)}),
        ((EARLY_READ, EARLY_LEARN), {"read": (4, 12), "learn": (7, 14)}),
    ],
)
def test_parts_begin_when_they_are_ready(
    stages: tuple[Stage, Stage], expected: dict[str, tuple[float, float]]
):
    found = with_rollout(*stages, STEP, TRANSFER)
    end = expected["learn"][1]
    last = {"step": (end, end + 1), "transfer": (end + 1, end + 1.5)}
    assert times(found) == {ROLLOUT: (0, 10), **expected, **last}
    assert sum(found.path.values()) == found.seconds == end + 1.5


def test_two_roles_read_at_once_on_devices_of_their_own():
    found = with_rollout(READ, replace(READ, name="judge", devices=FIRST), devices=ALL)
    assert times(found)["read"] == times(found)["judge"] == (10, 15)


def test_a_program_of_all_devices_waits_for_each_of_them():
    long = Stage("long", FIRST, (7.0,))
    found = with_rollout(READ, long, Stage("join", ALL, (1.0,)), devices=ALL)
    assert times(found)["join"] == (17, 18)
    assert found.path == {ROLLOUT: 10, "long": 7, "join": 1}


def test_the_path_leads_through_the_stage_that_was_waited_for():
    found = with_rollout(replace(EARLY_READ, seconds=(3.0, 9.0)), LEARN, STEP)
    assert found.bound == ROLLOUT and found.path == {ROLLOUT: 10, "read": 9, "learn": 4, "step": 1}


@pytest.mark.parametrize("seed", range(20))
def test_no_device_is_busier_than_the_iteration_is_long(seed: int):
    rng = np.random.default_rng(seed)
    ended = (*np.sort(rng.uniform(0, 10, 3)).tolist(), 10.0)
    stages: list[Stage] = []
    for number in range(6):
        devices = [(0,), (1,), (2,), (1, 2), (0, 1, 2)][rng.integers(5)]
        needs = tuple(x.name for x in stages if rng.random() < 0.4)
        ready_s = ended if 0 not in devices and rng.random() < 0.5 else ()
        seconds = tuple(rng.uniform(0, 3, 4).tolist())
        stages.append(Stage(f"s{number}", devices, seconds, needs, ready_s))
    found = scheduled(Iteration((0,), 10.0, tuple(stages)))
    total = 10 + sum(stage.total_s for stage in stages)
    assert max(map(found.busy_s, range(3))) <= found.seconds + 1e-9 <= total + 2e-9
    assert sum(found.path.values()) == pytest.approx(found.seconds)
    later = scheduled(Iteration((0,), 10.0, tuple(replace(x, ready_s=()) for x in stages)))
    spans = {span.name: span for span in later.spans}
    for stage in stages:
        assert spans[stage.name].begin_s >= 10
        assert all(spans[stage.name].begin_s >= spans[x].end_s - 1e-9 for x in stage.needs)


def test_whole_stages_keep_the_order_of_their_launches():
    """The critic's step comes before the policy's gradients, which could begin earlier."""
    other = Stage("other", SECOND, (6.0,), ("read",))
    found = times(with_rollout(READ, LEARN, STEP, other))
    assert found["step"] == (19, 20) and found["other"] == (20, 26)
