"""The memory of each part of devices under a placement: its rollout, and its update."""

from collections.abc import Collection, Iterator, Mapping

from pat_jax.planning.memory import GIB
from pat_jax.planning.placement import Positions, in_ranges
from pat_jax.profiling.capacity.placed_size import PlacedSize, RoleBytes, placed_role
from pat_jax.profiling.placement.candidates import Candidate
from pat_jax.profiling.placement.priced import PartMemory

Sizes = Mapping[int, PlacedSize]  # by number of devices, of each cut


def waiting(candidate: Candidate, sizes: Sizes) -> int:
    """Bytes of a device that roles take during a rollout, on the rollout's fullest device."""
    rollout = {*candidate.placement.places["rollout"]}
    parts = [part for part in candidate.placement.groups() if {*part} <= rollout]
    return max(sum(x.between for x in _there(candidate, sizes, part).values()) for part in parts)


def memory_of(candidate: Candidate, sizes: Sizes, rollout: int) -> Iterator[PartMemory]:
    """Yields the memory of each part, in the stage that takes most.

    Args:
      rollout: bytes of a device for weights and KV cache.
    """
    generates = {*candidate.placement.places["rollout"]}
    for part in candidate.placement.groups():
        roles = _there(candidate, sizes, part)
        between = sum(role.between for role in roles.values())
        update = between + _at_once(candidate, roles.values())
        sampling = between + rollout if {*part} <= generates else 0
        stage = "rollout" if sampling >= update else "update"
        yield PartMemory(part, stage, max(sampling, update))


def update_shortage(candidate: Candidate, sizes: Sizes, limit: float) -> str:
    """Returns which part has no room for an update and how much it lacks; empty if all have."""
    for part in memory_of(candidate, sizes, 0):
        if part.num_bytes > limit:
            lacking = (part.num_bytes - limit) / GIB
            return f"the update needs at least {lacking:.3g} GiB more of each of devices {in_ranges(part.devices)}"
    return ""


def _there(candidate: Candidate, sizes: Sizes, part: Positions) -> dict[str, RoleBytes]:
    """The roles that a part has, by name."""
    places = candidate.placement.places
    found: dict[str, RoleBytes] = {}
    for name in next(iter(sizes.values())).role_bytes:
        place = places["policy" if name == "policy" else placed_role(name)]
        if {*part} <= {*place}:
            found[name] = sizes[len(place)].role_bytes[name]
    return found


def _at_once(candidate: Candidate, roles: Collection[RoleBytes]) -> int:
    """Bytes beside what waits: of all roles that read at the same time, or of the one that takes
    most."""
    if candidate.overlap == "none":
        return max([0, *(role.in_update for role in roles)])
    if candidate.overlap == "scores":
        frozen = sum(role.in_update for role in roles if not role.gradients)
        return max([frozen, *(role.in_update for role in roles)])
    kept = sum(role.visiting + role.gradients for role in roles)
    return kept + max([0, *(role.temporaries for role in roles)])
