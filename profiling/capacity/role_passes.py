"""Predicts what the roles of a run take on a target: passes over micro-batches, and memory.

Knows roles and packed batches. Does not know rollouts.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import jax.numpy as jnp
import numpy as np

from pat_jax.config.role_table import Role
from pat_jax.layout.exchange import most_exchanged
from pat_jax.layout.layout import shard_bytes
from pat_jax.models.config import ModelConfig
from pat_jax.profiling.capacity.report import RoleMemory
from pat_jax.profiling.cross_compile.target_build import TargetBuild
from pat_jax.profiling.predict.composer import Composer
from pat_jax.profiling.predict.kernel_model import ModelledKernels
from pat_jax.profiling.predict.update_times import Seconds, UpdateTimes
from pat_jax.profiling.predict.update_work import (
    FLOAT32,
    Collective,
    Rows,
    UpdateWork,
    Work,
    apply_work,
)
from pat_jax.profiling.simulate.machine import Workload
from pat_jax.rl.batches.packing import Prefix, Shape, pack_rows
from pat_jax.training.trainable_params import TrainableParams
from pat_jax.training.trainer import CRITIC, POLICY, Trainer
from pat_jax.training.update_memory import fetched_bytes


@dataclass(frozen=True)
class Packed:
    """One iteration's micro-batches."""

    shapes: tuple[Shape, ...]
    # For each micro-batch, the number of pairs of query and key on the device that has most.
    pairs: tuple[float, ...]
    # For each response, the tokens of its prompt that it shares with another one.
    shared: tuple[int, ...]

    @classmethod
    def of(
        cls,
        workload: Workload,
        mini_batch: int,
        micro_shapes: Sequence[Shape],
        dp: int,
        *,
        shares_prompts: bool = False,
    ) -> "Packed":
        """Returns the micro-batches of the responses of one iteration.

        Args:
          mini_batch: responses of whole groups in one optimizer step.
          micro_shapes: shapes of micro-batches, see `rl.batches.packing.shapes`.
          dp: number of devices that the rows of a micro-batch are split over.
          shares_prompts: whether responses to one prompt may share it.
        """
        lengths = (workload.prompts + workload.responses).tolist()
        prefixes = _prefixes(workload) if shares_prompts else None
        shapes, pairs, shared = [], [], []
        for i in range(0, len(lengths), mini_batch):
            chosen = slice(i, i + mini_batch)
            mini = lengths[chosen]
            packing = pack_rows(mini, micro_shapes, prefixes and prefixes[chosen])
            of_device = np.zeros((len(packing.shapes), dp))
            for length, spot in zip(mini, packing.spots, strict=True):
                device = spot.row * dp // packing.shapes[spot.micro][0]
                seen = length * (length + 1) - spot.shared * (spot.shared + 1)
                of_device[spot.micro, device] += seen / 2
            shared += [spot.shared for spot in packing.spots]
            shapes += packing.shapes
            pairs += of_device.max(axis=1).tolist()
        return cls(tuple(shapes), tuple(pairs), tuple(shared))

    @property
    def slots(self) -> int:
        """Tokens of all micro-batches, padding included."""
        return sum(rows * length for rows, length in self.shapes)


def _prefixes(workload: Workload) -> list[Prefix] | None:
    """Returns each response's prefix, as `rl.batches.batches.prompt_prefixes`, or None."""
    if workload.prompt_id is None:
        return None
    both = zip(workload.prompt_id.tolist(), workload.prompts.tolist(), strict=True)
    return [Prefix(prompt, length - 1) for prompt, length in both]


@dataclass(frozen=True)
class RolePasses:
    """Predicts the seconds of the passes of one role. `held` has the role's parameters."""

    built: TargetBuild
    role: Role
    held: TrainableParams

    @property
    def model(self) -> ModelConfig:
        """The whole model, as it is padded on the target."""
        return self.held.policy.config

    @property
    def shapes(self) -> Sequence[Shape]:
        return self.built.micro_shapes

    @property
    def itemsize(self) -> int:
        """Bytes of one number in the forward pass."""
        return jnp.dtype(self.held.compute_dtype).itemsize

    @cached_property
    def work(self) -> UpdateWork:
        layout = self.held.layout
        lora = self.held.lora
        platform = self.built.order.target.chip.platform
        experts = self.model.experts
        predictor = self.built.whole.models[self.role.name].predictor
        return UpdateWork(
            self.model,
            layout.split.dp,
            layout.size(layout.fsdp_axes),
            self.role.compute.remat,
            lora.num_weights if lora else None,
            self.itemsize,
            predictor.logit_tokens if platform == "cuda" else 0,
            most_exchanged(self.role.compute.experts, experts, layout, platform),
            layout.size(layout.ep_dp_axes),
            self._hosts_of_groups,
        )

    @property
    def _hosts_of_groups(self) -> int:
        """Hosts over which the devices with the same part of the parameters are spread."""
        layout = self.held.layout
        target = self.built.order.target
        parts = layout.split.tp * layout.size(layout.fsdp_axes)
        of_a_host = max(1, target.devices_per_host // parts)
        return max(1, layout.mesh.size // parts // of_a_host)

    @cached_property
    def times(self) -> UpdateTimes:
        kernels = ModelledKernels(self.built.order.target, sums="nccl")
        return UpdateTimes(Composer(kernels, self.model))

    def predictions(self, packed: Packed) -> Seconds:
        """Returns the seconds of one forward pass over all micro-batches."""
        return self._pass(self.work.scores, packed)

    def gradients(self, packed: Packed) -> Seconds:
        """Returns the seconds of all forward and backward passes of an iteration."""
        trained = self.role.trained
        passes = trained.num_iterations if trained else 0
        return self._pass(self.work.gradients, packed).times(passes)

    def apply(self, trainer: Trainer) -> Seconds:
        """Returns the seconds of all optimizer steps of an iteration by this role's `trainer`."""
        params = shard_bytes(trainer.abstract_params)
        gradients = shard_bytes(trainer.trained.abstract_gradients)
        work = apply_work(
            params,
            gradients,
            shard_bytes(trainer.state_in_a_step) - params,
            offloaded=fetched_bytes(trainer),
            sent=tuple(self._sums_of_groups(gradients)),
        )
        return self.times.seconds(work).times(self.built.order.run.updates_per_step)

    def rows(self, shape: Shape, pairs: float = 0.0) -> Rows:
        """Returns a device's tokens of a micro-batch; `pairs` counts pairs of query and key."""
        return Rows(shape[0] * shape[1] // self.work.dp, pairs)

    def _pass(self, work_of: Callable[[Rows], Work], packed: Packed) -> Seconds:
        spent = Seconds()
        for shape, pairs in zip(packed.shapes, packed.pairs, strict=True):
            rows = self.rows(shape, pairs)
            spent += self.times.seconds(work_of(rows), rows.tokens)
        return spent

    def _sums_of_groups(self, gradients: int) -> Iterator[Collective]:
        """Yields the sum of gradients over FSDP groups, once for each optimizer step. `gradients`
        are the bytes of one device in float32."""
        summed = self.held.gradients
        if summed.groups:
            num_bytes = gradients * jnp.dtype(summed.dtype).itemsize / FLOAT32
            count = summed.groups.count
            hosts = self._hosts_of_groups
            yield Collective("all-reduce", num_bytes, count, hosts=hosts)


MOVES = "models from the host and back"


def other_stages(built: TargetBuild, packed: Sequence[Packed]) -> dict[str, Seconds]:
    """Returns the seconds of each stage besides the policy's passes, by its name, the mean over
    iterations. All roles read the policy's micro-batches; `packed` has those of each iteration."""
    found: dict[str, Seconds] = {}
    roles = built.whole
    for name, model in built.order.others.items():
        if name == CRITIC:
            continue
        what = "scores" if model.head == "scalar" else "log-probabilities"
        passes = RolePasses(built, roles.models[name].role, roles.readers[name].held)
        found[f"{what} of the {name}"] = _mean([passes.predictions(x) for x in packed])
    if critic := roles.critic:
        passes = RolePasses(built, roles.models[CRITIC].role, critic.trained)
        found["values of the critic"] = _mean([passes.predictions(x) for x in packed])
        gradients = _mean([passes.gradients(x) for x in packed])
        found["critic, forward and backward"] = gradients
        found["critic, optimizer"] = passes.apply(critic)
    if moved := sum(role.moved for role in role_memory(built)):
        found[MOVES] = Seconds(host=moved / built.order.target.chip.pcie_bytes_s)
    return found


def role_memory(built: TargetBuild) -> Iterator[RoleMemory]:
    """Yields the memory of each role, also if it waits in host memory between stages."""
    for trainer in built.whole.trained:
        yield _of_trained(trainer)
    for name, reader in built.whole.readers.items():
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
