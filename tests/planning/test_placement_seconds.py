"""Seconds of other placements are those of their stages, one after the other or at once."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pat_jax.planning.placement import PlacedRole, Placement, PlacementName
from pat_jax.planning.placement_seconds import described, placement_seconds

COUNT = 4  # devices
READS: dict[str, PlacedRole] = {
    "log-probabilities of the policy": "policy",
    "log-probabilities of the reference": "reference",
    "values of the critic": "critic",
    "scores of the reward model": "reward",
}
UPDATES: dict[str, PlacedRole] = {
    "update of the critic": "critic",
    "update of the policy": "policy",
}
ROLLOUT, TRANSFER = "rollout", "weights to the rollout"
OTHERS: tuple[PlacementName, ...] = ("interleave", "separate", "split")

seconds = st.lists(st.floats(0.01, 10), min_size=8, max_size=8)


def stages_of(taken: list[float]) -> dict[str, float]:
    return dict(zip([ROLLOUT, *READS, *UPDATES, TRANSFER], taken, strict=False))


def on_devices(name: PlacementName, stages: dict[str, float], half_rollout_s: float) -> float:
    """When the weights have arrived, if each stage begins once its devices are free."""
    placement, free = Placement.named(name, COUNT), np.zeros(COUNT)

    def run(stage: str, role: PlacedRole) -> None:
        place = list(placement.places[role])
        taken = stages[stage] * COUNT / len(place)
        if stage == ROLLOUT and len(place) < COUNT:
            taken = half_rollout_s
        free[place] = free[place].max() + taken

    run(ROLLOUT, "rollout")
    for stage, role in READS.items():
        if name == "interleave":  # one thread runs all models that share devices with rollouts
            free[:] = free.max()
        run(stage, role)
    free[:] = free.max()
    for stage, role in UPDATES.items():
        if name != "split":
            free[:] = free.max()
        run(stage, role)
    return free.max() + stages[TRANSFER]


@given(seconds, st.floats(1.0, 2.0))
def test_the_seconds_are_those_of_stages_on_their_devices(taken: list[float], growth: float):
    stages = stages_of(taken)
    half_rollout_s = growth * stages[ROLLOUT]
    found = placement_seconds(stages, half_rollout_s, OTHERS)
    assert list(found) == ["flatten", *OTHERS]
    assert found["flatten"] == pytest.approx(sum(stages.values()))
    expected = {name: on_devices(name, stages, half_rollout_s) for name in ("flatten", *OTHERS)}
    np.testing.assert_allclose([*found.values()], [*expected.values()])


@given(seconds)
def test_responses_that_end_evenly_are_read_meanwhile(taken: list[float]):
    """One after the other, each of equal size."""
    stages, count = stages_of(taken), 1000
    ended = np.arange(1, count + 1) / count * (half_rollout_s := 1.5 * stages[ROLLOUT])
    each = 2 * sum(stages[name] for name in READS) / count
    free = 0.0
    for at in ended:
        free = max(free, at) + each
    updates = 2 * sum(stages[name] for name in UPDATES)
    found = placement_seconds(stages, half_rollout_s, OTHERS)["separate"]
    wait = 2 * each + half_rollout_s / count  # for the first response and for the last
    assert found == pytest.approx(free + updates + stages[TRANSFER], abs=wait)
    after = placement_seconds(stages, half_rollout_s, OTHERS, reads_as_they_end=False)["separate"]
    rest = stages[TRANSFER] + updates
    assert after == pytest.approx(half_rollout_s + each * count + rest)


def test_only_what_is_asked_for_is_named_and_what_is_faster_is_advised():
    stages = stages_of([6.0, 1.0, 1.0, 2.0, 0.5, 4.0, 4.0, 0.5])
    found = placement_seconds(stages, 9.0, ("separate", "split"))
    assert found == {"flatten": 19.0, "separate": 25.5, "split": 19.5}
    assert described(found) == (
        "the stages of this iteration took 19 s with flatten, and would take 25.5 s with separate, "
        "19.5 s with split (passes on half of the devices are assumed to take twice as long)"
    )
    reads_most = stages | {
        "values of the critic": 4.0,
        "update of the critic": 0.5,
        "update of the policy": 0.5,
    }
    found = placement_seconds(reads_most | {"rollout": 14.0}, 14.0, ("separate",))
    assert described(found).endswith("; --resume --placement separate goes on with it")
    assert "no other placement fits" in described(placement_seconds(stages, 9.0, ()))
