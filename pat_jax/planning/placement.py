"""Which devices each model of a run has.

A placement names devices by their positions in the run's order, never by JAX objects. Four
placements have names, three of them by arXiv 2312.11819, split by HybridFlow (arXiv 2409.19256,
section 8.3):

    flatten      every role has all devices: the stages of an iteration follow one another
    interleave   policy, rollouts and critic have all devices; the reference and the teacher have
                 the first half, the reward models the second; they read one after the other
    separate     rollouts have the first half, all other roles the second
    split        rollouts have all devices, critic and reward models the second half, the others the
                 first. Each half has whole processes, and both update at once
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, get_args

PlacedRole = Literal["rollout", "policy", "critic", "reference", "teacher", "reward"]
ROLES: tuple[PlacedRole, ...] = get_args(PlacedRole)
PlacementName = Literal["flatten", "interleave", "separate", "split"]
# Fewest processes of `split`: with several, Orbax refuses arrays that are on one process alone.
LEAST_SPLIT = 4
Positions = tuple[int, ...]  # of devices in the run's order, ascending


@dataclass(frozen=True)
class Placement:
    """The devices of each role."""

    places: Mapping[PlacedRole, Positions]

    @classmethod
    def named(cls, name: PlacementName, count: int) -> "Placement":
        """Returns a placement of this name on `count` devices. Halves of an odd number are as even
        as they can be; one device is shared by all roles."""
        every = tuple(range(count))
        first = every[: count // 2] or every
        second = every[count // 2 :]
        places: dict[PlacedRole, Positions] = dict.fromkeys(ROLES, every)
        if name == "interleave":
            places |= {"reference": first, "teacher": first, "reward": second}
        if name == "separate":
            places = dict.fromkeys(ROLES, second)
            places["rollout"] = first
        if name == "split":
            places = dict.fromkeys(ROLES, first)
            places |= {"rollout": every, "critic": second, "reward": second}
        return cls(places)

    @property
    def is_flat(self) -> bool:
        """Whether all roles have the same devices."""
        return len(set(self.places.values())) == 1

    def are_apart(self, one: PlacedRole, other: PlacedRole) -> bool:
        """Returns whether two roles have no device in common."""
        return not {*self.places[one]} & {*self.places[other]}


def described(places: Mapping[PlacedRole, Positions]) -> str:
    """Returns the roles by their devices, such as "rollout 0-3; policy, critic 4-7"."""
    by_place: dict[Positions, list[str]] = {}
    for role, place in places.items():
        by_place.setdefault(place, []).append(role)
    return "; ".join(f"{', '.join(names)} {in_ranges(place)}" for place, names in by_place.items())


def in_ranges(positions: Positions) -> str:
    """Returns positions of devices in the form that options take, such as 0-3,8."""
    begins = [i for i in positions if i - 1 not in positions]
    ends = [i for i in positions if i + 1 not in positions]
    pairs = zip(begins, ends, strict=True)
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in pairs)
