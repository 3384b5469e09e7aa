"""The options that a run's programs depend on; a plan compiles them for other devices."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from pat_jax.config.by_model import settled_dtype
from pat_jax.config.compute import MicroBatches
from pat_jax.config.learning import AlgorithmConfig
from pat_jax.config.lora import AdapterConfig
from pat_jax.config.role_table import POLICY, REFERENCE, Role, reward_role, role_table
from pat_jax.config.rollout import RolloutConfig
from pat_jax.config.run import RunConfig
from pat_jax.config.speculation import SpeculationConfig


@dataclass(frozen=True)
class ProgramChoice:
    """The options that programs depend on.

    Attributes:
      dtype: data type of the arithmetic, float32 or bfloat16.
      roles: the policy, its reference if there is one, and the other models. A role's `source` is
        empty if it begins as the policy, else "own".
      fsdp_size: number of devices over which parameters are divided; 0: all devices.
      rest: where models wait while no stage needs them.
      trains: whether there are updates.
      updates_per_step: optimizer steps of an iteration.
    """

    rollout: RolloutConfig
    speculation: SpeculationConfig
    algorithm: AlgorithmConfig
    micro_batches: MicroBatches
    dtype: str
    roles: tuple[Role, ...]
    fsdp_size: int
    rest: Literal["auto", "device", "host"]
    trains: bool
    updates_per_step: int

    @property
    def policy(self) -> Role:
        return self.roles[0]


def program_choice(
    run: RunConfig, others: Sequence[str] = (), *, num_layers: int, platform: str
) -> ProgramChoice:
    """Returns the options that the programs of a run depend on.

    Args:
      others: the names of the run's models except the policy and the reference.
      num_layers: layers of the whole policy; decides whether shallower copies run as a loop.
      platform: `jax.Device.platform` of the devices.
    """
    names = "rollout algorithm optimizer lora speculation roles critic teacher reward train remat"
    kept = {name: getattr(run, name) for name in f"{names} model fsdp_size experts".split()}
    scans = "true" if run.compute.scans(num_layers, platform) else "false"
    run = RunConfig(**kept, compute_dtype=run.compute_dtype, scan_layers=scans)
    dtype = settled_dtype("auto", platform, is_checkpoint=True)
    known = {role.name: role for role in role_table(run, platform)}
    roles = [known[name] for name in (POLICY, REFERENCE) if name in known]
    roles += [known.get(name) or reward_role(name, dtype) for name in others]
    return ProgramChoice(
        rollout=run.rollout,
        speculation=run.speculation,
        algorithm=replace(run.algorithm, mini_batch_size=run.mini_batch_size),
        micro_batches=run.micro_batches,
        dtype=run.compute_dtype,
        roles=tuple(map(_unnamed, roles)),
        fsdp_size=run.fsdp_size,
        rest=run.roles.rest,
        trains=run.train,
        updates_per_step=run.updates_per_step,
    )


def of_rollouts(
    rollout: RolloutConfig, speculation: SpeculationConfig, dtype: Literal["float32", "bfloat16"]
) -> ProgramChoice:
    """Returns the options that the programs of rollouts depend on, without training."""
    run = RunConfig(
        compute_dtype=dtype,
        train=False,
        rollout=rollout,
        speculation=speculation,
        scan_layers="false",
    )
    return program_choice(run, num_layers=1, platform="")


def _unnamed(role: Role) -> Role:
    trained = role.trained
    if trained:
        lora = AdapterConfig(**trained.lora.shared(AdapterConfig))
        trained = replace(trained, lora=lora, export_dir="")
    return replace(role, source="own" if role.source else "", trained=trained)
