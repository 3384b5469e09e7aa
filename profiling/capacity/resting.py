"""Settles what depends on memory; compares iterations whose models wait between their stages on
devices, and in host memory.

Knows orders, replays and updates. Does not know how a plan is printed.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Literal

from pat_jax.engine.sizing.layout_choice import worth_planning
from pat_jax.planning.types import Split
from pat_jax.profiling.capacity.costs import SourcedLatency
from pat_jax.profiling.capacity.report import Resting, RestingIteration, RoleMemory
from pat_jax.profiling.capacity.role_passes import role_memory
from pat_jax.profiling.capacity.update import PlannedUpdate
from pat_jax.profiling.cross_compile.by_arithmetic import by_arithmetic
from pat_jax.profiling.cross_compile.target_build import Order, TargetBuild
from pat_jax.profiling.simulate.machine import Workload
from pat_jax.training.remat_choice import settled_remat
from pat_jax.training.rest import has_more_room

Rest = Literal["device", "host"]


def with_rest(order: Order, rest: Rest) -> Order:
    return replace(order, run=replace(order.run, rest=rest))


def settled(order: Order) -> Order:
    """Returns the order with `--roles.rest auto` and `--remat auto` settled as in a run."""
    order = _with_settled_rest(order)
    build = by_arithmetic(order)
    remat, _ = settled_remat(order.run.policy.compute.remat, build.whole, build.limit)
    roles = tuple(role.with_remat(remat) for role in order.run.roles)
    return replace(order, run=replace(order.run, roles=roles))


def _with_settled_rest(order: Order) -> Order:
    run = order.run
    if run.rest != "auto":
        return order
    here, away = with_rest(order, "device"), with_rest(order, "host")
    sequences = run.rollout.num_responses
    if not run.trains or (room := by_arithmetic(here).whole_sequences) >= sequences:
        return here
    more = by_arithmetic(away).whole_sequences
    return away if has_more_room(room, more, sequences) else here


def both(
    build: TargetBuild,
    updating: PlannedUpdate,
    workloads: Sequence[Workload],
    rollout_s: Callable[[TargetBuild, tuple[Split, ...]], float],
    costs: SourcedLatency,
) -> Resting:
    """Returns iterations for both values of `--roles.rest`: models wait on the devices, or in the
    host's memory. `updating` predicts the updates of `build`. `rollout_s` returns the mean seconds
    of a rollout, by a build and the layouts that it uses."""
    chosen: Rest = "host" if build.order.run.rest == "host" else "device"
    found: list[RestingIteration] = []
    roles: tuple[RoleMemory, ...] = ()
    for rest in ("device", "host"):
        own = build if rest == chosen else by_arithmetic(with_rest(build.order, rest))
        kept, _ = worth_planning(own.order.run.rollout, own.layouts, own.alone, costs.latency)
        known = {split for split, _, _ in costs.latency.decode_table}
        used = tuple(split for split in kept if split in known)
        target = used[0] if used else next(iter(own.layouts))
        updates = updating if own is build else replace(updating, built=own)
        update = updates.of(workloads, target)
        found.append(
            RestingIteration(
                rest,
                own.memory.resident,
                max((own.memory.pool(split) for split in used), default=0),
                rollout_s(own, used) if used else None,
                update.total_s,
            )
        )
        roles = tuple(role_memory(own))  # at last with the moves of models that rest
    return Resting(chosen, roles, (found[0], found[1]))
