"""When replicas have been uneven for so long that a move within their row bucket is due."""

from dataclasses import replace

import numpy as np
from fakes import SPLITS
from made_up_machines import CAP, SLOWER_WITH_TP, lengths_of, machine

from pat_jax.planning.planner.planner import CostModelPlanner
from pat_jax.planning.types import Load

DP8, DP4TP2, *_ = SPLITS


def test_a_move_within_a_bucket_waits_until_as_much_is_lost_as_it_costs():
    """Fifteen rows or nine: both need the bucket of sixteen, and a step reads what is held."""
    costs = machine(SLOWER_WITH_TP, per_row=1e-3, shift_per_token=2e-3)
    steps = {key: s for key, s in costs.decode_table.items() if key[1] in (1, 2, 4, 8, 16, 32)}
    costs = replace(costs, decode_table=steps, reads="held")
    planner = CostModelPlanner((DP4TP2,), costs, lengths_of((CAP, 1)))
    replica = np.repeat(np.arange(4), [15, 3, 3, 3])
    evened = replica.copy()
    evened[:6] = [1, 1, 2, 2, 3, 3]
    moved_at = []
    for step in range(1, 40):
        alike = np.ones(len(replica), int)
        now = Load(replica, step * alike, 20 * alike, (CAP - step) * alike, step=step)
        if planner.decide(now, DP4TP2, [evened]).replica is not None:
            moved_at.append(step)
    assert moved_at and moved_at == [*range(moved_at[0], 40)] and moved_at[0] > 3
