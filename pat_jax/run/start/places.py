"""The devices of each role of a run, as its placement says.

Knows options and devices. Does not know models, nor what the roles do.
"""

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from pat_jax.common.devices import Device
from pat_jax.common.hosts.together import process_group
from pat_jax.common.rules import require
from pat_jax.config.critic import critic_source
from pat_jax.config.placement import PlacementConfig
from pat_jax.config.run import RunConfig
from pat_jax.planning.placement import (
    ROLES,
    PlacedRole,
    Placement,
    Positions,
    described,
    in_ranges,
)


@dataclass(frozen=True)
class Places:
    """The devices of a run, and of each role."""

    devices: Sequence[Device]
    placement: Placement

    @classmethod
    def of(cls, config: RunConfig, devices: Sequence[Device]) -> "Places":
        """Returns the places that the options ask for.

        Raises:
          OptionError: the placement does not fit these devices or these options.
        """
        options, count = config.placement, len(devices)
        placement = _placement(options, count)
        found, name = cls(devices, placement), "placement.name"
        if placement.is_flat and len(placement.places["rollout"]) == count:
            is_possible = options.overlap != "gradients"
            expected = "none or scores with --placement flatten, where all models have the rollouts' devices"
            require(is_possible, "placement.overlap", options.overlap, expected)
            return found
        processes = process_group().count
        expected = f"flatten on {processes} processes: other placements run in one process"
        require(processes == 1, name, options.name, expected)
        of_policy, of_rollout = (placement.places[role] for role in ("policy", "rollout"))
        require(
            of_policy == of_rollout or placement.are_apart("policy", "rollout"),
            "placement.rollout",
            options.rollout or options.name,
            f"the devices of the policy ({in_ranges(of_policy)}), or none of them",
        )
        beside = [role for role in ROLES if not placement.are_apart(role, "rollout")]
        require(
            options.overlap != "gradients" or beside == ["rollout"],
            "placement.overlap",
            options.overlap,
            f"none or scores where rollouts share devices with {', '.join(beside[1:])}",
        )
        for role in ("reference", "critic"):
            shares = config.lora.is_on and (role == "reference" or _shares_base(config))
            require(
                not shares or not found.differ(role, "policy"),
                f"placement.{role}",
                getattr(options, role) or options.name,
                f"the policy's devices ({in_ranges(of_policy)}) with adapters on one base, which is there",
            )
        return found

    def __getitem__(self, role: PlacedRole) -> list[Device]:
        """The devices of a role."""
        return [self.devices[i] for i in self.placement.places[role]]

    def differ(self, one: PlacedRole, other: PlacedRole) -> bool:
        """Whether two roles have different devices."""
        return self.placement.places[one] != self.placement.places[other]

    def describe(self, roles: Collection[PlacedRole]) -> str:
        """Returns a line on the devices of these roles; empty if all have the same."""
        if self.placement.is_flat:
            return ""
        found: dict[PlacedRole, Positions] = {}
        for role in ROLES:
            if role in roles:
                found[role] = self.placement.places[role]
        return f"devices: {described(found)}"

    def row_shards(self, of_policy: int) -> int:
        """Returns the number that divides the rows of each micro-batch of an iteration, so that
        every role that reads them can split them.

        Args:
          of_policy: parts into which the policy's layout splits rows.
        """
        sizes = [len(self[role]) for role in ("critic", "reference", "teacher")]
        others = [n for n in sizes if n != len(self["policy"])]
        return math.lcm(of_policy, *others)


def _placement(options: PlacementConfig, count: int) -> Placement:
    """Returns the devices of each role, of `count` devices."""
    assert options.name != "auto", "a command settles it before it builds a run"
    places = dict(Placement.named(options.name, count).places)
    given: dict[PlacedRole, Positions] = {}
    for role in ROLES:
        given[role] = options.positions(role, count)
    if options.name == "separate" and (of_rollout := given["rollout"]):
        others = tuple(i for i in range(count) if i not in of_rollout)
        options.need("rollout", others != (), f"fewer than all {count} devices with separate")
        places = dict.fromkeys(ROLES, others)
    for role, positions in given.items():
        if positions:
            places[role] = positions
    return Placement(places)


def _shares_base(config: RunConfig) -> bool:
    """Whether the critic has adapters on the policy's base."""
    source = critic_source(config.critic.model, config.reward, config.model)
    return config.critic.lora.is_on and not source
