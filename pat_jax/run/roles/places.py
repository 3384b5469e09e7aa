"""The devices of each role of a run, as its placement says.

A placement divides all processes of a run alike: it names devices by their number within a process,
so that each process has devices of every role. Only `split` gives roles whole processes. Knows
options and devices. Does not know models, nor what the roles do.
"""

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from pat_jax.common.devices import Device
from pat_jax.common.rules import require
from pat_jax.config.placement import PlacementConfig
from pat_jax.layout.mesh import hosts_of
from pat_jax.planning.placement import (
    LEAST_SPLIT,
    ROLES,
    PlacedRole,
    Placement,
    PlacementName,
    Positions,
    described,
    in_ranges,
)


@dataclass(frozen=True)
class Places:
    """The devices of a run, and of each role."""

    devices: Sequence[Device]
    placement: Placement  # numbers of the devices of each role, in each part
    parts: Sequence[Sequence[Device]]  # devices of each process; or one part with all
    is_split: bool = False  # whether models have whole processes

    @classmethod
    def of(
        cls,
        options: PlacementConfig,
        devices: Sequence[Device],
        on_one_base: Collection[PlacedRole] = (),
    ) -> "Places":
        """Returns the places that the options ask for.

        Args:
          on_one_base: roles whose adapters are on the policy's base.

        Raises:
          OptionError: the placement does not fit these devices or these options.
        """
        if options.name == "split":
            return cls(devices, _split(options, devices), [devices], is_split=True)
        parts = _parts(options, devices)
        count = len(parts[0])
        placement = _placement(options, count, len(parts))
        found = cls(devices, placement, parts)
        if placement.is_flat and len(placement.places["rollout"]) == count:
            expected = "0 with --placement flatten, where all models have the rollouts' devices"
            require(not options.lag, "placement.lag", options.lag, expected)
            return found
        of_policy, of_rollout = (placement.places[role] for role in ("policy", "rollout"))
        require(
            of_policy == of_rollout or placement.are_apart("policy", "rollout"),
            "placement.rollout",
            options.rollout or options.name,
            f"the devices of the policy ({in_ranges(of_policy)}), or none of them",
        )
        _check_lag(options, placement, len(parts))
        for role in on_one_base:
            require(
                not found.differ(role, "policy"),
                f"placement.{role}",
                getattr(options, role) or options.name,
                f"the policy's devices ({in_ranges(of_policy)}) with adapters on one base, which is there",
            )
        return found

    def __getitem__(self, role: PlacedRole) -> list[Device]:
        """The devices of a role."""
        return [part[i] for part in self.parts for i in self.placement.places[role]]

    def differ(self, one: PlacedRole, other: PlacedRole) -> bool:
        """Whether two roles have different devices."""
        return self.placement.places[one] != self.placement.places[other]

    def describe(self, roles: Collection[str]) -> str:
        """Returns a line on the devices of these roles; empty if all have the same."""
        if self.placement.is_flat:
            return ""
        found: dict[PlacedRole, Positions] = {}
        for role in ROLES:
            if role in roles:
                found[role] = self.placement.places[role]
        where = f"devices of each of {len(self.parts)} processes" * (len(self.parts) > 1)
        return f"{where or 'devices'}: {described(found)}"

    def row_shards(self, of_policy: int) -> int:
        """Returns the number that divides the rows of each micro-batch of an iteration, so that
        every role that reads them can split them.

        Args:
          of_policy: parts into which the policy's layout splits rows.
        """
        sizes = [len(self[role]) for role in ("critic", "reference", "teacher")]
        others = [n for n in sizes if n != len(self["policy"])]
        return math.lcm(of_policy, *others)


def _split(options: PlacementConfig, devices: Sequence[Device]) -> Placement:
    """Returns the placement `split`.

    Raises:
      OptionError: these processes cannot be split.
    """
    found = [device.process_index for device in devices]
    counts = {found.count(process) for process in found}
    processes = len({*found})
    hosts = len({*hosts_of(devices)})
    are_even = processes % 2 == 0 and (hosts % 2 == 0 or hosts == 1)
    options.need(
        "name",
        processes >= LEAST_SPLIT and are_even and len(counts) == 1,
        f"flatten with {processes} process{'es' * (processes > 1)}: split needs an even number of "
        f"processes and hosts, {LEAST_SPLIT} processes or more with as many devices each",
    )
    is_in_order = found == sorted(found) and devices[0].platform != "tpu"
    expected = "flatten on these devices, which are not in the order of their processes"
    options.need("name", is_in_order, expected)
    return Placement.named("split", len(devices))


def _check_lag(options: PlacementConfig, placement: Placement, num_parts: int) -> None:
    """Raises OptionError if --placement.lag is 1, and rollouts share devices or processes are
    several."""
    if not options.lag:
        return
    shared = [role for role in ROLES if not placement.are_apart(role, "rollout")]
    expected = f"0 where rollouts share devices with {', '.join(shared[1:])}"
    options.need("lag", shared == ["rollout"], expected)
    expected = f"0 with {num_parts} processes: one process alone updates while it generates"
    options.need("lag", num_parts == 1, expected)


def _parts(options: PlacementConfig, devices: Sequence[Device]) -> list[list[Device]]:
    """Returns the devices of each process if the options give roles devices of their own, else all
    devices in one part.

    Raises:
      OptionError: the processes cannot be cut alike.
    """
    asked = {role: getattr(options, role) for role in ROLES if getattr(options, role)}
    if _named(options) != "flatten":
        asked = {"name": options.name}
    if not asked:
        return [list(devices)]
    parts: dict[int, list[Device]] = {}
    for device in devices:
        parts.setdefault(device.process_index, []).append(device)
    sizes = {len(part) for part in parts.values()}
    (field, value), *_ = asked.items()
    expected = "the same number of devices in each process, or flatten for all models"
    require(len(sizes) == 1, f"placement.{field}", value, expected)
    expected = (
        f"flatten for all models, since each of the {len(parts)} processes has one device and each "
        "needs devices of every model; start one process for all devices of a host"
    )
    require(len(parts) == 1 or sizes != {1}, f"placement.{field}", value, expected)
    return list(parts.values())


def _named(options: PlacementConfig) -> PlacementName:
    """Returns the placement in force: auto is flatten, and others are only compared with it."""
    return "flatten" if options.name == "auto" else options.name


def _placement(options: PlacementConfig, count: int, num_parts: int) -> Placement:
    """Returns the devices of each role, of the `count` devices of each part."""
    whole = "the run's" if num_parts == 1 else "each process's"
    places = dict(Placement.named(_named(options), count).places)
    given: dict[PlacedRole, Positions] = {}
    for role in ROLES:
        given[role] = options.positions(role, count, whole)
    if options.name == "separate" and (of_rollout := given["rollout"]):
        others = tuple(i for i in range(count) if i not in of_rollout)
        options.need("rollout", others != (), f"fewer than all {count} devices with separate")
        places = dict.fromkeys(ROLES, others)
    for role, positions in given.items():
        if positions:
            places[role] = positions
    return Placement(places)
