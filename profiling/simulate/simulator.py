"""A rollout on a simulated clock: the planner and the scheduler that ship, known response lengths.

Every duration is looked up in a latency model, the truth; the planner may believe in another one.
Pools hold every sequence, or as much as the machine's memory says.
"""

import numpy as np

from pat_jax.engine.record.report import RolloutReport
from pat_jax.engine.rollout import rollout
from pat_jax.engine.scheduler import Scheduler
from pat_jax.engine.sequences.contents import Contents
from pat_jax.engine.sequences.sequence_table import SequenceTable
from pat_jax.planning.planner.planner import Planner
from pat_jax.planning.types import Split
from pat_jax.profiling.simulate.machine import Machine, Workload
from pat_jax.profiling.simulate.simulated_executor import SimulatedExecutor


def replay(workload: Workload, planner: Planner, machine: Machine) -> RolloutReport:
    """Runs one rollout to its end under `planner`."""
    split = planner.start(workload.load(machine.capacity))
    scheduler = waiting(workload, machine, split)
    tables = scheduler.cache_manager.tables
    executor = SimulatedExecutor(workload.responses, machine, tables, split, workload.accepts)
    report = RolloutReport(is_computed=True)
    for _ in rollout(scheduler, executor, planner, report):
        continue
    return report


def waiting(workload: Workload, machine: Machine, split: Split) -> Scheduler:
    """The scheduler of a rollout that begins in `split`, in which all sequences wait."""
    table = SequenceTable(
        workload.prompts,
        np.full(workload.size, workload.cap),
        prompt_id=workload.prompt_id,
        num_replicas=split.dp,
        rows_per_replica=1,
    )
    shapes = machine.shapes(int(table.end.max(initial=1)))
    options = {"runs_ahead": machine.runs_ahead, "expected": workload.expected}
    return Scheduler(Contents(table), shapes, split, **options)
