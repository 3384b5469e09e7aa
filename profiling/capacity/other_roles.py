"""Predicts what the roles other than the policy take in an iteration: seconds and bytes.

Knows the roles of a run. Does not know rollouts.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

from pat_jax.engine.sizing.memory import shard_bytes
from pat_jax.profiling.capacity.resting_report import RoleMemory
from pat_jax.profiling.capacity.role_passes import RolePasses
from pat_jax.profiling.capacity.update_batches import Packed
from pat_jax.profiling.cross_compile.target_build import TargetBuild
from pat_jax.profiling.predict.update_times import Seconds
from pat_jax.training.roles import Roles
from pat_jax.training.trainable_params import TrainableParams
from pat_jax.training.trainer import CRITIC, POLICY, Trainer

MOVES = "models from the host and back"


@dataclass(frozen=True)
class OtherRoles:
    """Predicts what the roles of a run take on a target, without the policy's own passes."""

    built: TargetBuild

    @cached_property
    def roles(self) -> Roles:
        return self.built.whole

    def stages(self, packed: Sequence[Packed]) -> dict[str, Seconds]:
        """Returns the seconds of each stage by its name, the mean over iterations. All roles read
        the policy's micro-batches; `packed` has those of each iteration."""
        found: dict[str, Seconds] = {}
        for name, model in self.built.order.others.items():
            if name == CRITIC:
                continue
            what = "scores" if model.head == "scalar" else "log-probabilities"
            passes = self.passes(name, self.roles.readers[name].held)
            found[f"{what} of the {name}"] = _mean([passes.predictions(x) for x in packed])
        if critic := self.roles.critic:
            passes = self.passes(CRITIC, critic.trained)
            found["values of the critic"] = _mean([passes.predictions(x) for x in packed])
            gradients = _mean([passes.gradients(x) for x in packed])
            found["critic, forward and backward"] = gradients
            found["critic, optimizer"] = passes.apply(critic)
        if moved := sum(role.moved for role in self.memory()):
            rate = self.built.order.target.chip.pcie_bytes_s
            found[MOVES] = Seconds(host=moved / rate)
        return found

    def passes(self, name: str, held: TrainableParams) -> RolePasses:
        """Returns the passes of a role with the parameters `held`."""
        return RolePasses(self.built, self.roles.models[name].role, held)

    def memory(self) -> Iterator[RoleMemory]:
        """Yields the memory of each role, also if it waits in host memory between stages."""
        for trainer in self.roles.trained:
            yield _of_trained(trainer)
        for name, reader in self.roles.readers.items():
            params = shard_bytes(reader.abstract_params)
            yield RoleMemory(name, params, 0, params if reader.rests else 0)


def _of_trained(trainer: Trainer) -> RoleMemory:
    name = "policy" if trainer.name == POLICY else trainer.name
    params, state = shard_bytes(trainer.abstract_params), shard_bytes(trainer.state_in_a_step)
    held = params + shard_bytes(trainer.own_base)
    place = trainer.placement
    during, between = (
        shard_bytes(place.on_devices(trainer.state_in_a_step, in_an_update=is_in))
        for is_in in (True, False)
    )
    # Both ways for an update; parameters also come for the values before it, and need not go back.
    for_values = params if place.rests == "state" and trainer.predicts else 0
    return RoleMemory(name, held, state - params, 2 * (during - between) + for_values)


def _mean(parts: Sequence[Seconds]) -> Seconds:
    return sum(parts, Seconds()).times(1 / len(parts))
