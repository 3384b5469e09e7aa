"""Lists the placements among which the planner chooses.

The devices are cut into one, two or three parts. Each role has one of them, or all devices. Knows
numbers of devices and names of roles. Does not know what a placement costs.
"""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise, product
from typing import Literal, get_args

from pat_jax.planning.placement import (
    ROLES,
    PlacedRole,
    Placement,
    PlacementName,
    Positions,
    described,
)

Overlap = Literal["none", "scores", "gradients"]
MOST_PARTS = 3
NAMES: tuple[PlacementName, ...] = get_args(PlacementName)


@dataclass(frozen=True)
class Candidate:
    """A placement, and what is done while responses are still generated.

    scores: models on other devices than the rollout's read each response as it ends. gradients: so
    do the gradients of the policy and the critic.
    """

    placement: Placement
    overlap: Overlap = "none"
    tail: int = 0  # responses left at which a rollout goes to half of the devices; 0: it stays

    @property
    def key(self) -> tuple[object, ...]:
        return tuple(self.placement.places[role] for role in ROLES), self.overlap, self.tail

    def name(self, roles: Collection[PlacedRole]) -> str:
        """The placement's name, or the devices of each of `roles`; and the overlap, if any."""
        overlap = "" if self.overlap == "none" else f", {self.overlap}"
        tail = f", tail {self.tail}" * (self.tail > 0)
        found = self._places(roles)
        return f"{self.known_name(roles) or described(found)}{overlap}{tail}"

    def known_name(self, roles: Collection[PlacedRole]) -> PlacementName | None:
        """The name of a placement that gives `roles` the same devices; None: there is none."""
        found = self._places(roles)
        count = len({i for place in self.placement.places.values() for i in place})
        for name in NAMES:
            places = Placement.named(name, count).places
            if all(places[role] == place for role, place in found.items()):
                return name
        return None

    def _places(self, roles: Collection[PlacedRole]) -> dict[PlacedRole, Positions]:
        present: list[PlacedRole] = [role for role in ROLES if role in roles]
        found: dict[PlacedRole, Positions] = {}
        for role in present:
            found[role] = self.placement.places[role]
        return found


def candidates(
    count: int, roles: Collection[PlacedRole], *, streams_gradients: bool
) -> list[Candidate]:
    """Returns the candidates for `count` devices, flatten first, no two alike.

    Args:
      roles: that the run has, `rollout` and `policy` among them.
      streams_gradients: whether the algorithm can begin gradients before the rollout has ended.
    """
    found: dict[tuple[object, ...], Candidate] = {}
    for placement in placements(count, roles):
        for overlap in _overlaps(placement, roles, streams_gradients=streams_gradients):
            one = Candidate(placement, overlap)
            found.setdefault(one.key, one)
    return list(found.values())


def placements(count: int, roles: Collection[PlacedRole]) -> Iterator[Placement]:
    """Yields the placements, those with names first, without `split` (`split_of`). Roles that a run
    has not are with the policy."""
    for name in NAMES:
        if name == "split":
            continue
        placed = Placement.named(name, count)
        if all(_divides(place, count) for place in placed.places.values()):
            yield _only(placed, roles)
    every = tuple(range(count))
    others: list[PlacedRole] = [
        role for role in ROLES if role in roles and role not in ("rollout", "policy")
    ]
    seen: set[tuple[object, ...]] = set()
    for sizes in cuts(count):
        parts = [tuple(range(*ends)) for ends in pairwise([0, *accumulate(sizes)])]
        # Where a role may have all devices too, three parts would make thousands.
        places = [*parts, every] if len(parts) == 2 else parts
        for rollout, policy in _sampled_and_trained(parts, places, count):
            for chosen in product(places, repeat=len(others)):
                asked = rollout, policy, *chosen
                shape = tuple(_as_first(asked, parts))
                if shape not in seen and _uses_all(asked, parts):
                    seen.add(shape)
                    named: dict[PlacedRole, Positions] = {"rollout": rollout, "policy": policy}
                    yield _only(Placement(named | dict(zip(others, chosen, strict=True))), roles)


def split_of(count: int, roles: Collection[PlacedRole]) -> Candidate:
    """Returns the candidate `split`, for `count` devices of several hosts."""
    return Candidate(_only(Placement.named("split", count), roles))


def cuts(count: int) -> Iterator[tuple[int, ...]]:
    """Yields the sizes of two or three parts that are all devices together. Each size divides
    their number, as a run asks."""
    sizes = [n for n in range(count - 1, 0, -1) if count % n == 0]
    for number in range(2, MOST_PARTS + 1):
        for chosen in product(sizes, repeat=number):
            if sum(chosen) == count and list(chosen) == sorted(chosen, reverse=True):
                yield chosen


def _sampled_and_trained(
    parts: Sequence[Positions], places: Sequence[Positions], count: int
) -> Iterator[tuple[Positions, Positions]]:
    """Yields the places of rollout and policy: the same one, or two without a common device.

    Sizes of a rollout's own devices are powers of two, so that it has layouts to choose from.
    """
    for rollout, policy in product(places, places):
        is_chain = len(rollout) == count or len(rollout).bit_count() == 1
        if is_chain and (rollout == policy or (rollout in parts and policy in parts)):
            yield rollout, policy


def _as_first(asked: Sequence[Positions], parts: Sequence[Positions]) -> Iterator[object]:
    """Yields for each place what it is apart from the order of parts of one size."""
    met: dict[int, list[Positions]] = {}
    for place in asked:
        if place not in parts:
            yield "all"
            continue
        of_size = met.setdefault(len(place), [])
        if place not in of_size:
            of_size.append(place)
        yield len(place), of_size.index(place)


def _uses_all(asked: Sequence[Positions], parts: Sequence[Positions]) -> bool:
    used = {i for place in asked for i in place}
    return all(used >= {*part} for part in parts) and len({*asked}) > 1


def _only(placement: Placement, roles: Collection[PlacedRole]) -> Placement:
    """`placement` with the roles that a run has not at the policy's place."""
    policy = placement.places["policy"]
    given = placement.places
    places: dict[PlacedRole, Positions] = {
        role: given.get(role, policy) if role in roles else policy for role in ROLES
    }
    return Placement(places)


def _divides(place: Positions, count: int) -> bool:
    return count % len(place) == 0


def _overlaps(
    placement: Placement, roles: Collection[PlacedRole], *, streams_gradients: bool
) -> Iterator[Overlap]:
    yield "none"
    apart = [r for r in roles if r != "rollout" and placement.are_apart(r, "rollout")]
    if any(role != "policy" for role in apart):
        yield "scores"
    if streams_gradients and len(apart) == len(roles) - 1:
        yield "gradients"
