"""Replays a run's rollouts on some of a target's devices, beside models that wait there.

Knows numbers of devices and bytes. Does not know roles.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import fmean

from pat_jax.engine.sizing.layout_choice import worth_planning
from pat_jax.planning.memory import GIB, USABLE
from pat_jax.planning.types import Split
from pat_jax.profiling.capacity.costs import SourcedLatency, costs_of, of_fewer_devices
from pat_jax.profiling.capacity.question import Question, machine_of
from pat_jax.profiling.cross_compile.by_arithmetic import by_arithmetic, nearest
from pat_jax.profiling.cross_compile.target_build import TargetBuild
from pat_jax.profiling.simulate.comparison import Replayed, adaptive_rollouts
from pat_jax.profiling.simulate.machine import Machine

PARTS = 128  # of a device's memory: bytes of waiting models are rounded up to whole ones


@dataclass(frozen=True)
class Rollouts:
    """The rollouts of a series on some devices."""

    done: Sequence[Replayed]
    first: Split  # layout in which the first one begins
    weights: int  # bytes of a device in that layout
    held: int  # bytes of a device for weights and KV cache, in the layout with most

    @property
    def mean_s(self) -> float:
        return fmean(one.total_s for one in self.done)

    @property
    def is_pressed(self) -> bool:
        return any(one.is_pressed for one in self.done)


@dataclass
class PlacedRollouts:
    """Rollouts by number of devices and by bytes that other models take there, each replayed
    once."""

    question: Question
    _done: dict[int, dict[int, Rollouts]] = field(default_factory=dict)
    _of_fewer: dict[int, SourcedLatency | None] = field(default_factory=dict)

    def of(self, build: TargetBuild, resident: int) -> Rollouts | str:
        """Returns the rollouts on the devices of `build`, or why they have no room.

        Args:
          resident: bytes of a device that models take which wait there.
        """
        part = max(1, int(build.limit / PARTS))
        resident = -(-resident // part) * part
        known = self._done.setdefault(build.order.target.num_devices, {})
        for other, rollouts in known.items():
            # No response waited for pages where there were fewer.
            if other == resident or (other > resident and not rollouts.is_pressed):
                return rollouts
        found = self._replayed(build, resident)
        if not isinstance(found, str):
            known[resident] = found
        return found

    def _replayed(self, whole: TargetBuild, resident: int) -> Rollouts | str:
        machine = self.machine(whole, resident)
        if isinstance(machine, str):
            return machine
        done = list(adaptive_rollouts(machine, self.question.lengths, self.question.series))
        first, memory = done[0].first, machine.memory
        assert memory is not None, "that of the target"
        held = max(memory.weights[split] + memory.pool(split) for split in machine.splits)
        return Rollouts(done, first, memory.weights[first], held)

    def machine(self, whole: TargetBuild, resident: int) -> Machine | str:
        """Returns the machine of rollouts on the devices of `whole`, or why they have no room. The
        arguments are those of `of`."""
        build = _beside(whole, resident)
        if build is None:
            return f"models that wait take {resident / GIB:.3g} GiB of a device"
        costs = self._costs(whole)
        if isinstance(costs, str):
            return costs
        config = build.order.config
        kept, _ = worth_planning(config, build.layouts, build.alone, costs.latency)
        known = {split for split, _, _ in costs.latency.decode_table}
        used = tuple(split for split in kept if split in known)
        needs, best = build.alone, nearest(build.alone)
        if not used or needs.held(best) > needs.usable:
            lacking = (needs.held(best) - needs.usable) / GIB
            return f"a rollout needs {lacking:.3g} GiB more of a device than is left in {best}"
        return machine_of(replace(self.question, build=build, costs=costs), used)

    def _costs(self, build: TargetBuild) -> SourcedLatency | str:
        question, target = self.question, build.order.target
        if target == question.build.order.target:
            return question.costs
        if target.num_devices not in self._of_fewer:
            self._of_fewer[target.num_devices] = self._costs_of_fewer(build)
        found = self._of_fewer[target.num_devices]
        return found or f"the profile has no times of {target.num_devices} devices"

    def _costs_of_fewer(self, build: TargetBuild) -> SourcedLatency | None:
        """The times of fewer devices than all; None: a profile has none of them."""
        question, options = self.question, self.question.options
        if options.profile:
            whole = question.build.order
            return of_fewer_devices(question.costs, Path(options.profile), whole, build)
        return costs_of(build, None, Path(options.data), options.sums)


def _beside(whole: TargetBuild, resident: int) -> TargetBuild | None:
    """The rollout alone, on devices without the memory that waiting models take; None: nothing is
    left."""
    left = whole.limit - resident / USABLE
    if left <= 0:
        return None
    config = whole.order.config
    rollout = replace(config.rollout, device_memory_gib=left / GIB)
    alone = replace(config, train=False, rollout=rollout, lora=replace(config.lora, rank=0))
    return by_arithmetic(replace(whole.order, config=alone, others={}))
