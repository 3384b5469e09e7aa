"""When replicas have been uneven for so long that a move within their row bucket is due."""

from dataclasses import replace

import numpy as np
import pytest
from fakes import SPLITS
from made_up_machines import CAP, FASTER_WITH_TP, SLOWER_WITH_TP, lengths_of, machine

from pat_jax.planning.planner.balance import Unevenness
from pat_jax.planning.planner.costs import CostTables
from pat_jax.planning.planner.planner import CostModelPlanner
from pat_jax.planning.types import Load, Reads

DP8, DP4TP2, *_ = SPLITS


def tables(reads: Reads) -> CostTables:
    return CostTables.of(replace(machine(FASTER_WITH_TP, per_row=1e-3), reads=reads), SPLITS)


def load(step: int, fullest: int = 9) -> Load:
    replica = np.repeat(np.arange(4), [fullest, 3, 3, 3])
    alike = np.ones(len(replica), int)
    return Load(replica, step * alike, (20 + step) * alike, 80 * alike, step=step)


def test_what_is_lost_adds_up_until_sequences_move_or_the_layout_changes():
    seen, held = Unevenness(), tables("held")
    seen.see(load(0), DP4TP2, held, 2.0)
    assert (seen.lost_s, seen.next_s) == (0.0, 0.0)
    seen.see(load(32), DP4TP2, held, 2.0)
    first = seen.lost_s
    assert 0 < first < seen.next_s  # longer caches, and as many steps to come
    seen.see(load(32), DP4TP2, held, 2.0)  # a plan made twice
    assert seen.lost_s == first
    seen.see(load(40), DP4TP2, held, 2.0)
    assert seen.lost_s == pytest.approx(first * 1.25, rel=0.2) and seen.next_s < first
    seen.moved()
    seen.see(load(48, fullest=3), DP4TP2, held, 2.0)
    assert (seen.lost_s, seen.next_s) == (0.0, 0.0)
    seen.see(load(56), DP4TP2, held, 2.0)
    seen.see(load(64), DP4TP2, held, 2.0)
    assert seen.lost_s > 0
    seen.see(load(72), DP8, held, 2.0)
    assert seen.lost_s == 0


def test_nothing_is_lost_where_a_bucket_is_read_whatever_it_holds():
    """Five rows and nine need the bucket of sixteen."""
    coarse = np.array([4, 16])
    tables = _with_rows(coarse)
    assert tables.is_within_bucket(np.repeat([0, 1], [9, 1]), np.repeat([0, 1], [5, 5]))
    assert not tables.is_within_bucket(np.repeat([0, 1], [6, 2]), np.repeat([0, 1], 4))


def _with_rows(rows: np.ndarray) -> CostTables:
    return replace(tables("bucket"), rows=rows)


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
