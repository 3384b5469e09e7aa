"""Which placements the planner considers, and which one it chooses."""

from dataclasses import replace

import pytest

from pat_jax.planning.placement import ROLES, PlacedRole, Placement, in_ranges
from pat_jax.profiling.placement.candidates import Candidate, candidates, cuts
from pat_jax.profiling.placement.priced import PartMemory, Placements, Priced

PPO: tuple[PlacedRole, ...] = ("rollout", "policy", "critic", "reference", "reward")
ALONE: tuple[PlacedRole, ...] = ("rollout", "policy")


def names(count: int, roles: tuple[PlacedRole, ...], *, streams: bool = True) -> list[str]:
    return [x.name(roles) for x in candidates(count, roles, streams_gradients=streams)]


def test_devices_are_cut_into_numbers_that_a_run_can_have():
    assert [*cuts(8)] == [(4, 4), (4, 2, 2)]
    assert [*cuts(12)] == [(6, 6), (6, 4, 2), (6, 3, 3), (4, 4, 4)]
    assert [*cuts(1)] == []


def test_named_placements_come_first_and_flatten_before_all():
    found = names(8, PPO)
    assert found[:5] == [
        "flatten",
        "interleave",
        "separate",
        "separate, scores",
        "separate, gradients",
    ]
    assert "rollout 0-3; policy 4-5; critic, reference, reward 6-7, gradients" in found
    assert "rollout, policy, critic 0-7; reference 0-3; reward 4-7" not in found  # interleave


def test_a_policy_alone_has_little_to_choose_from():
    assert names(8, ALONE) == ["flatten", "separate", "separate, gradients"]
    assert names(8, ALONE, streams=False) == ["flatten", "separate"]
    assert names(1, PPO) == ["flatten"]


@pytest.mark.parametrize("count", [2, 4, 8, 12, 32])
def test_candidates_are_what_a_run_accepts(count: int):
    found = candidates(count, PPO, streams_gradients=True)
    assert len(found) <= 500
    assert len({(x.overlap, *(x.placement.places[r] for r in ROLES)) for x in found}) == len(found)
    for one in found:
        places = one.placement.places
        assert {i for place in places.values() for i in place} == {*range(count)}
        assert all(count % len(place) == 0 for place in places.values())
        is_named = ";" not in one.name(PPO)
        assert is_named or len(places["rollout"]) in (1, 2, 4, 8, 16, count)
        is_apart = one.placement.are_apart("rollout", "policy")
        assert is_apart or places["rollout"] == places["policy"]
        assert one.overlap == "none" or any(one.placement.are_apart("rollout", r) for r in PPO)


def test_parts_of_one_size_are_not_told_apart():
    found = candidates(8, PPO, streams_gradients=False)
    shapes = set()
    for one in found:
        places = [one.placement.places[role] for role in PPO]
        first = {place: i for i, place in reversed([*enumerate(places)])}
        shape = tuple((len(place), first[place]) for place in places)
        assert (shape, one.overlap) not in shapes
        shapes.add((shape, one.overlap))


def test_positions_are_written_as_options_take_them():
    assert in_ranges((0, 1, 2, 5, 7, 8)) == "0-2,5,7-8"


def priced(name: str, seconds: float | None, parts: int = 1, refusal: str = "") -> Priced:
    memory = tuple(PartMemory((i,), "update", 1) for i in range(parts))
    one = Candidate(Placement.named("flatten", 1))
    return Priced(name, memory, one, seconds, refusal=refusal, is_named=True)


def chosen(*found: Priced, error: float = 0.1) -> Placements:
    return Placements(found, error, True, len(found))


@pytest.mark.parametrize(
    ("flatten", "separate", "expected", "words"),
    [
        (100.0, 95.0, "flatten", "1.05 times as fast, and prices may be wrong by 10.0 %"),
        (100.0, 80.0, "separate", "1.25 times as fast as with flatten, more than the 10.0 %"),
        (100.0, 120.0, "flatten", "no other placement is predicted to be faster"),
        (None, 120.0, "separate", "flatten has no room (2 GiB more)"),
        (100.0, None, "flatten", "no other placement is predicted to be faster"),
        (None, None, "flatten", "No placement has room: 2 GiB more"),
    ],
)
def test_flatten_is_left_for_more_than_prices_may_be_wrong(
    flatten: float | None, separate: float | None, expected: str, words: str
):
    refusal = "2 GiB more" if flatten is None else ""
    found = chosen(priced("flatten", flatten, refusal=refusal), priced("separate", separate, 2))
    assert found.chosen.name == expected and words in found.reason


def test_smaller_errors_need_smaller_gains():
    pair = priced("flatten", 100.0), priced("separate", 93.0)
    assert chosen(*pair, error=0.05).chosen.name == "separate"
    assert chosen(*pair).chosen.name == "flatten"


def test_what_differs_little_may_gain_little():
    flatten, tail = priced("flatten", 100.0), priced("flatten, tail 16", 96.0)
    assert chosen(flatten, replace(tail, worst_s=99.9)).chosen.name == "flatten, tail 16"
    found = chosen(flatten, priced("separate", 95.0), replace(tail, worst_s=99.9))
    assert found.chosen.name == "flatten, tail 16"
    assert (
        "1.04 times as fast as with flatten, even if all on halves of the devices takes 10.0 % longer"
        in found.reason
    )
    assert chosen(flatten, replace(tail, worst_s=100.1)).chosen.name == "flatten"


def test_of_candidates_about_as_fast_the_one_with_fewest_parts_is_chosen():
    found = chosen(priced("flatten", 100.0), priced("three", 50.0, 3), priced("two", 50.4, 2))
    assert found.chosen.name == "two"


def test_one_device_leaves_no_choice():
    assert chosen(priced("flatten", 1.0)).reason == (
        "flatten: there is no other placement of these devices."
    )


def test_places_that_roles_do_not_have_are_the_policys():
    for one in candidates(4, ALONE, streams_gradients=False):
        places = one.placement.places
        assert places["critic"] == places["policy"]
    assert Placement.named("flatten", 4).is_flat
