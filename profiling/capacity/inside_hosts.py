"""The time that `--fsdp_size` would save a planned update that gathers weights across hosts."""

from collections.abc import Iterator, Sequence
from dataclasses import replace

from pat_jax.common.text_table import percent
from pat_jax.planning.types import Split
from pat_jax.profiling.capacity.update import PlannedUpdate
from pat_jax.profiling.cross_compile.by_arithmetic import by_arithmetic
from pat_jax.profiling.simulate.machine import Workload

SMALL = 0.01  # share of an update's time; a smaller saving is not mentioned


def inside_hosts(
    updating: PlannedUpdate, workloads: Sequence[Workload], target: Split
) -> Iterator[str]:
    """Yields a sentence if the update is faster with all parameters in each host, and they fit
    there. Both updates are computed by arithmetic: only programs of the planned one are
    compiled."""
    order = updating.built.order
    size = order.target.devices_per_host
    if order.target.num_hosts == 1 or order.run.fsdp_size:
        return
    here = replace(updating, programs=())
    divided = replace(order, run=replace(order.run, fsdp_size=size))
    there = replace(here, built=by_arithmetic(divided))
    room, less_room = (int(each.built.whole_sequences) for each in (here, there))
    if not less_room:
        return
    now, then = (each.of(workloads, target) for each in (here, there))
    saved = 1 - then.total_s / now.total_s
    if saved < SMALL or then.memory.shortage:
        return
    yield (
        f"The update gathers weights across hosts. With --fsdp_size {size} each host has all of them, "
        f"and an update takes {percent(saved)} less: {then.total_s:.3g} s instead of {now.total_s:.3g} (by "
        f"arithmetic). The KV cache then has room for {less_room:,} of the longest sequences, instead of "
        f"{room:,}."
    )
