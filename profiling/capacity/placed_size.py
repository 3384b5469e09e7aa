"""A run's models on some of a target's devices: seconds of passes, bytes of each role.

Knows one number of devices. Does not know which roles are together, nor rollouts.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

from pat_jax.common.errors import UserError
from pat_jax.engine.sizing.memory import shard_bytes
from pat_jax.layout.division import prime_factors
from pat_jax.planning.placement import PlacedRole
from pat_jax.planning.stage_names import LOGPROBS, SCORES, VALUES
from pat_jax.profiling.capacity.other_roles import OtherRoles
from pat_jax.profiling.capacity.plan_config import PlanConfig
from pat_jax.profiling.capacity.role_passes import RolePasses
from pat_jax.profiling.capacity.update import PlannedUpdate
from pat_jax.profiling.capacity.update_batches import Packed, prefixes_of
from pat_jax.profiling.capacity.update_needs import inputs_bytes
from pat_jax.profiling.cross_compile.by_arithmetic import by_arithmetic
from pat_jax.profiling.cross_compile.target_build import Order, TargetBuild
from pat_jax.profiling.predict.targets import Target
from pat_jax.profiling.predict.update_times import Seconds
from pat_jax.profiling.simulate.machine import Workload
from pat_jax.rl.batches.packing import next_batch
from pat_jax.training.build import shares_prompts
from pat_jax.training.build_copies import copy_shards
from pat_jax.training.roles import REFERENCE, TEACHER
from pat_jax.training.trainer import CRITIC


def part_of(target: Target, count: int, num_cuts: int = 1) -> Target | None:
    """Returns the target of `count` neighbouring devices of a target, of the same chip; None: there
    is none such.

    GPUs are of one host, or of whole hosts. A TPU slice is cut along its longest sides.

    Args:
      num_cuts: equal groups of the target's GPUs, each inside a host. The part has as many devices
        of each.
    """
    if count == target.num_devices:
        return target
    shape = _shape_of(target, count, num_cuts)
    return target.resized(shape) if shape else None


def _shape_of(target: Target, count: int, num_cuts: int) -> str | None:
    """Returns the devices of `part_of`, as a target is written."""
    per_host = target.devices_per_host
    if target.chip.platform == "cuda":
        if num_cuts > 1:
            return f"{count // target.num_hosts}x{target.num_hosts}"
        whole = count % per_host == 0
        if count > per_host and not whole:
            return None
        return f"{per_host}x{count // per_host}" if whole else f"{count}"
    sides = [*target.topology]
    for factor in prime_factors(target.num_devices // count):
        longest = max((side for side in sides if side % factor == 0), default=0)
        if not longest:
            return None
        sides[sides.index(longest)] //= factor
    return "x".join(map(str, sorted(sides)))


@dataclass(frozen=True)
class RoleBytes:
    """Bytes of one role on a device."""

    between: int  # while no stage needs it
    visiting: int  # more while it reads or learns: what comes from the host's memory
    gradients: int = 0  # accumulated; 0: it is frozen
    temporaries: int = 0  # the least that a pass takes: a micro-batch's gradients, and inputs

    @property
    def in_update(self) -> int:
        """More bytes while it reads or learns."""
        return self.visiting + self.gradients + self.temporaries


def placed_role(name: str) -> PlacedRole:
    """The role whose devices the role of a plan has."""
    named: Mapping[str, PlacedRole] = {REFERENCE: "reference", TEACHER: "teacher", CRITIC: "critic"}
    return named.get(name, "reward")


@dataclass(frozen=True)
class PlacedSize:
    """A run's models on one number of devices."""

    build: TargetBuild
    data: Path | None  # a folder with kernel tables
    options: PlanConfig

    @classmethod
    def of(cls, whole: TargetBuild, options: PlanConfig, target: Target) -> "PlacedSize":
        """The models of the run `whole` on `target`, a part of its devices."""
        order, data = whole.order, Path(options.data)
        if target == order.target:
            return cls(whole, data, options)
        tokens = options.run(target).algorithm.tokens_per_micro_batch
        algorithm = replace(order.config.algorithm, tokens_per_micro_batch=tokens)
        run = replace(order.config, algorithm=algorithm)
        models = order.model, order.depths, order.draft_model, order.others
        return cls(by_arithmetic(Order.of(target, run, *models)), data, options)

    @property
    def target(self) -> Target:
        return self.build.order.target

    @cached_property
    def update(self) -> PlannedUpdate:
        # Compiled programs of all devices would be compared with arithmetic of fewer.
        return PlannedUpdate(self.build, self.data, (), self.options)

    @cached_property
    def reads(self) -> dict[str, str]:
        """What each role predicts before an update, by the role's name."""
        others = self.build.order.others
        found = {
            name: SCORES if name in others and others[name].head == "scalar" else LOGPROBS
            for name in self.build.whole.readers
        }
        if self.build.whole.policy.predicts:
            found["policy"] = LOGPROBS
        return found | ({CRITIC: VALUES} if self.build.whole.critic else {})

    @cached_property
    def trains(self) -> list[str]:
        """The names of the trained roles, in the order of their updates."""
        return [CRITIC if x.name == CRITIC else "policy" for x in self.build.whole.trained]

    def packed(self, workload: Workload) -> Packed:
        """The policy's micro-batches of one iteration."""
        trainer = self.build.whole.policy
        is_shared = shares_prompts(self.build.order.config, trainer.layout.platform)
        return self._packed(workload, is_shared=is_shared)

    def packed_for(self, other: "PlacedSize", workload: Workload) -> Packed:
        """The micro-batches of these shapes as the devices of `other` compute them."""
        trainer, sizes = self.build.whole.policy, (workload.size, self.update.shapes)
        is_shared = shares_prompts(self.build.order.config, trainer.layout.platform)
        return Packed.of(workload, *sizes, other.update.work.dp, shares_prompts=is_shared)

    def next_read(self, workload: Workload) -> int:
        """How many of these responses, the first ones, a thread reads together in a rollout's tail;
        0: it waits for others."""
        lengths = (workload.prompts + workload.responses).tolist()
        trainer, shapes = self.build.whole.policy, self.update.shapes
        is_shared = shares_prompts(self.build.order.config, trainer.layout.platform)
        return next_batch(lengths, shapes, prefixes_of(workload) if is_shared else None)

    def packed_early(self, workload: Workload) -> Packed:
        """The micro-batches in which models read responses while others are generated."""
        return self._packed(workload, is_shared=False)

    def _packed(self, workload: Workload, *, is_shared: bool) -> Packed:
        run = self.build.order.config
        sizes = run.algorithm.mini_batch_size * run.rollout.num_generations, self.update.shapes
        return Packed.of(workload, *sizes, self.update.work.dp, shares_prompts=is_shared)

    def reading(self, packed: Packed) -> dict[str, Seconds]:
        """Seconds of each pass without gradients, by the name of the role that makes it: all before
        an update."""
        return {name: self._passes(name).predictions(packed) for name in self.reads}

    def training(self, packed: Packed) -> dict[str, tuple[Seconds, Seconds]]:
        """Seconds of all gradients and of the optimizer, by the name of each trained role."""
        return {
            name: (self._passes(name).gradients(packed), self._passes(name).apply(trainer))
            for name, trainer in zip(self.trains, self.build.whole.trained, strict=True)
        }

    def _passes(self, name: str) -> RolePasses:
        """The passes of a role; the reference's are the policy's."""
        return self._other_passes.get(name, self.update.passes)

    @cached_property
    def _other_passes(self) -> dict[str, RolePasses]:
        whole, passes = self.build.whole, OtherRoles(self.build, self.data, ()).passes
        own = {name: x for name, x in whole.readers.items() if name in self.build.order.others}
        found = {name: passes(name, reader.held) for name, reader in own.items()}
        if whole.critic:
            found[CRITIC] = passes(CRITIC, whole.critic.trained)
        return found

    @cached_property
    def moves_s(self) -> dict[str, float]:
        """Seconds in which each role comes from the host's memory and goes back, by name."""
        rate = self.target.chip.pcie_bytes_s
        every = OtherRoles(self.build, self.data, ()).memory()
        return {role.name: role.moved / rate for role in every if role.moved}

    @cached_property
    def role_bytes(self) -> dict[str, RoleBytes]:
        """Bytes of each role on a device, by name."""
        found = dict(self._of_readers())
        for trainer in self.build.whole.trained:
            name = CRITIC if trainer.name == CRITIC else "policy"
            between = shard_bytes(trainer.kept)
            place, state = trainer.placement, trainer.state_in_a_step
            held = shard_bytes(place.on_devices(state, in_an_update=True))
            gradients = shard_bytes(trainer.trained.abstract_gradients)
            passes = replace(self.update.passes, held=trainer.trained)
            visiting = held - shard_bytes(place.on_devices(trainer.abstract_state))
            # As `update_needs.py`: a micro-batch's own gradients are temporaries.
            temporaries = gradients + inputs_bytes(passes)
            found[name] = RoleBytes(between, visiting, gradients, temporaries)
        return found

    def in_a_tail(self, num_cuts: int) -> "PlacedSize":
        """The same models as copies that read in a tail, on this half of `num_cuts` groups of
        devices: fewer devices may divide each."""
        order, count = self.build.order, self.target.num_devices
        run = replace(order.config, fsdp_size=copy_shards(order.config.fsdp_size, count, num_cuts))
        return replace(self, build=by_arithmetic(replace(order, config=run)))

    @property
    def copies(self) -> list[int]:
        """Bytes of a device for a copy of each model that reads before an update."""
        whole = self.build.whole
        trained = {("policy" if x is whole.policy else CRITIC): x for x in whole.trained}
        held = {**whole.readers, **trained}
        return [shard_bytes(held[name].abstract_params) for name in self.reads]

    def _of_readers(self) -> Iterator[tuple[str, RoleBytes]]:
        for name, reader in self.build.whole.readers.items():
            resident, visiting = shard_bytes(reader.resident), shard_bytes(reader.visiting)
            yield name, RoleBytes(resident, visiting)


def carried_s(kept: int, target: Target, sizes: Sequence[int]) -> float:
    """Seconds in which weights travel to a rollout's own devices.

    Args:
      kept: bytes of a device there.
      sizes: devices of the policy and of the rollout, which have none in common.
    """
    chip = target.chip
    is_inside = math.fsum(sizes) <= target.devices_per_host
    return kept / (chip.link_bytes_s if is_inside else chip.host_link_bytes_s)


def spread_s(whole: int, target: Target) -> float:
    """Seconds in which hosts receive the rollout's weights from the hosts that have the policy.

    Args:
      whole: bytes of all weights. Each device of a host receives its part of them.
    """
    chip = target.chip
    rate = chip.link_bytes_s if target.num_hosts == 1 else chip.host_link_bytes_s
    return whole / target.devices_per_host / rate


def sized(
    whole: TargetBuild, options: PlanConfig, counts: Sequence[int], num_cuts: int
) -> tuple[dict[int, PlacedSize], dict[int, str]]:
    """Returns the models on each number of devices, and why a number cannot be.

    Args:
      counts: numbers of devices of each of `num_cuts` groups (`part_of`).
    """
    found: dict[int, PlacedSize] = {}
    refused: dict[int, str] = {}
    for count in counts:
        target = part_of(whole.order.target, count * num_cuts, num_cuts)
        if target is None:
            refused[count] = f"{count} devices are neither part of a host nor whole hosts"
            continue
        try:
            size = PlacedSize.of(whole, options, target)
            if size.build.layouts:
                found[count] = size
            else:
                refused[count] = f"no layout of {target} divides the model"
        except UserError as error:
            refused[count] = str(error)
    return found, refused
