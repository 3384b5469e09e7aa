"""The part of a plan's report about the place where models wait between their stages."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class RoleMemory:
    """Bytes of one role on a device."""

    name: str
    parameters: int  # with adapters, also the base model's, if no other role has it
    optimizer: int  # moments and counters; 0: the role is frozen
    moved: int  # to and from host memory in an iteration; 0: the role stays on devices


@dataclass(frozen=True)
class RestingIteration:
    """One iteration with models that wait on the devices, or in the host's memory."""

    rest: Literal["device", "host"]
    resident: int  # bytes of a device that models take during a rollout
    kv_cache: int  # bytes of a device, in the layout with most
    rollout_s: float | None  # mean of the adaptive rollouts; None: no layout fits
    update_s: float  # with the transfer, and with moves from the host and back

    @property
    def total_s(self) -> float | None:
        return None if self.rollout_s is None else self.rollout_s + self.update_s


@dataclass(frozen=True)
class Resting:
    """The models of a run, and its iterations for both values of `--roles.rest`."""

    chosen: Literal["device", "host"]  # the place that the rest of the plan assumes
    roles: tuple[RoleMemory, ...]
    iterations: tuple[RestingIteration, RestingIteration]  # device, host

    @property
    def gain(self) -> float | None:
        """How many times as fast iterations are with models in the host's memory; None: one of the
        two does not fit."""
        here, away = (each.total_s for each in self.iterations)
        return here / away if here and away else None
