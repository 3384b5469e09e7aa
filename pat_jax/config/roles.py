"""Options of a run's roles: the policy, the reference, the critic, the reward models."""

from dataclasses import dataclass
from typing import Literal

from pat_jax.common.options.declared import Options


@dataclass(frozen=True)
class RolesConfig(Options):
    """Where the models of a run wait (docs/roles.md)."""

    SECTION = "roles."

    rest: Literal["auto", "device", "host"] = "auto"
    """Where models wait while no stage needs them: the parameters of frozen models, the critic, and
    the policy's moments. host: in the host's memory, so that rollouts have room for more KV cache;
    each goes to the devices before its stage. device: where they are. auto: host if the KV cache
    has no room otherwise for all responses of an iteration at full length."""
