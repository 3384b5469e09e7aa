"""Controllers of sequences that have begun, in two replicas, on host state alone."""

from dataclasses import replace

import numpy as np

from pat_jax.engine.scheduler import Scheduler
from pat_jax.engine.sequences.contents import Contents
from pat_jax.engine.sequences.sequence_table import SequenceTable
from pat_jax.layout.buckets import Buckets, Shapes
from pat_jax.planning.types import Plan, Split

DP2 = Split(2, 1)
PROMPT, CAP = 5, 59
SHAPES = Shapes(
    Buckets({DP2: (2, 4, 8)}, (32, 64)),
    pages={DP2: 200},
    page_size=4,
    burst_steps=16,
    check_every=4,
)


def make_scheduler(
    count: int, shapes: Shapes = SHAPES, rows: int = 8, prompt: int = PROMPT
) -> Scheduler:
    """Sequences have been admitted to `rows` of each of two replicas, the largest row bucket."""
    table = SequenceTable(
        np.full(count, prompt), np.full(count, CAP), num_replicas=2, rows_per_replica=rows
    )
    fewer = tuple(n for n in shapes.buckets.rows[DP2] if n < rows)
    shapes = replace(shapes, buckets=replace(shapes.buckets, rows={DP2: (*fewer, rows)}))
    scheduler = Scheduler(Contents(table), shapes, DP2, runs_ahead=True)
    scheduler.admit()
    return scheduler


def end(scheduler: Scheduler, kept: int) -> None:
    """All but so many in each replica have said enough."""
    table = scheduler.table
    running, replica = table.running, table.replica(table.running)
    ended = {i for g in range(2) for i in running[replica == g][kept:].tolist()}
    scheduler.end(lambda i: i in ended)


def at(threshold: int) -> Plan:
    return Plan(DP2, threshold)
