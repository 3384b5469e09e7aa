"""Rollouts whose groups drift apart within a row bucket: how far the planner stays behind hindsight."""

from dataclasses import replace
from itertools import permutations

import numpy as np
from fakes import SPLITS

from pat_jax.layout.buckets import Buckets
from pat_jax.planning.latency.model import ROUNDS, LatencyModel
from pat_jax.planning.lengths.model import LengthModel
from pat_jax.planning.planner.planner import CostModelPlanner
from pat_jax.profiling.simulate.hindsight import clairvoyant
from pat_jax.profiling.simulate.machine import Machine, Workload
from pat_jax.profiling.simulate.simulator import replay

CAP, SIZE = 2048, 512
BUCKETS = Buckets.build(SPLITS, capacity=SIZE, min_rows=1, min_length=512, max_length=CAP + 64)


def machine(round_s: float) -> Machine:
    """Steps read weights and caches over the devices of a group, and sum over them."""
    steps = {
        (split, rows, length): 1e-3
        + 4.5e-3 / split.tp
        + 4e-4 * np.log2(split.tp)
        + rows * (20e-6 + 4e-8 * length) / split.tp**0.6
        for split in SPLITS
        for rows in BUCKETS.rows[split]
        for length in BUCKETS.lengths
    }
    pairs = list(permutations(SPLITS, 2))
    moves = {(*pair, kind): 1e-6 for pair in pairs for kind in ROUNDS}
    moves |= {(split, split, ROUNDS[0]): round_s for split in SPLITS}
    calls = {(split, length): 1e-3 for split in SPLITS for length in BUCKETS.lengths}
    reslice = dict.fromkeys(pairs, 0.02)
    tables = steps, reslice, moves, calls
    truth = LatencyModel(*tables, prefill_blocks=64, page_size=16, round_tokens=1, reads="held")
    return Machine(truth, SPLITS, BUCKETS, runs_ahead=True)


def without_moves(machine: Machine) -> Machine:
    moves = machine.truth.migrate_table.items()
    between_layouts = {key: seconds for key, seconds in moves if key[0] != key[1]}
    return replace(machine, truth=replace(machine.truth, migrate_table=between_layouts))


def drawn(seed: int, log_length: float = 5.7) -> Workload:
    draw = np.random.default_rng(seed)
    responses = np.clip(draw.lognormal(log_length, 1, SIZE).astype(int), 1, CAP)
    return Workload(draw.integers(20, 64, SIZE), responses, CAP)


def learned(log_length: float = 5.7) -> LengthModel:
    seen = np.concatenate([drawn(100 + i, log_length).responses for i in range(4)])
    return LengthModel.empty(CAP).updated(seen, seen >= CAP)


LENGTHS = learned()


def test_groups_that_drift_apart_cost_less_than_one_percent():
    here, regrets = machine(1e-6), []
    for seed in range(4):
        done = replay(drawn(seed), CostModelPlanner(SPLITS, here.truth, LENGTHS), here)
        regrets.append(done.total_s / clairvoyant(drawn(seed), here).total_s - 1)
        degrees = [int(name[-1]) for name in done.trace.path]
        assert degrees == sorted(degrees) and done.trace.balanced
    assert np.mean(regrets) < 0.01


def test_where_moves_cost_much_few_are_made():
    """No more is spent on them than was lost by having none."""
    dear = machine(1e-3)
    done = replay(drawn(0), CostModelPlanner(SPLITS, dear.truth, LENGTHS), dear)
    none = without_moves(dear)
    without = replay(drawn(0), CostModelPlanner(SPLITS, none.truth, LENGTHS), none)
    assert done.balance_share < 0.01 and done.total_s < 1.01 * without.total_s


def test_where_no_move_pays_rollouts_begin_as_without_moves():
    """Twenty tokens end before groups are worth evening."""
    lengths, load = learned(3.0), drawn(0, 3.0).load(SIZE)
    dear = machine(1.0)
    begun = [
        CostModelPlanner(SPLITS, here.truth, lengths).start(load)
        for here in (dear, without_moves(dear))
    ]
    assert begun[0] == begun[1]
