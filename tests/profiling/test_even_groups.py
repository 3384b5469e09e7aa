"""Rollouts whose groups drift apart within a row bucket: how far the planner stays behind the
oracle."""

from itertools import permutations

import numpy as np
from fakes import SPLITS

from pat_jax.layout.buckets import Buckets
from pat_jax.planning.latency.model import ROUNDS, LatencyModel
from pat_jax.planning.lengths.model import LengthModel
from pat_jax.planning.planner.planner import CostModelPlanner
from pat_jax.profiling.simulate.machine import Machine, Workload
from pat_jax.profiling.simulate.oracle import oracle
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
    reshard = dict.fromkeys(pairs, 0.02)
    tables = steps, reshard, moves, calls
    truth = LatencyModel(*tables, prefill_blocks=64, page_size=16, round_tokens=1, reads="held")
    return Machine(truth, SPLITS, BUCKETS, runs_ahead=True)


def drawn(seed: int) -> Workload:
    draw = np.random.default_rng(seed)
    responses = np.clip(draw.lognormal(5.7, 1, SIZE).astype(int), 1, CAP)
    return Workload(draw.integers(20, 64, SIZE), responses, CAP)


SEEN = np.concatenate([drawn(100 + i).responses for i in range(4)])
LENGTHS = LengthModel.empty(CAP).updated(SEEN, SEEN >= CAP)


def test_groups_that_drift_apart_cost_less_than_one_percent():
    here, regrets = machine(1e-6), []
    for seed in range(4):
        done = replay(drawn(seed), CostModelPlanner(SPLITS, here.truth, LENGTHS), here)
        regrets.append(done.total_s / oracle(drawn(seed), here).total_s - 1)
        degrees = [int(name[-1]) for name in done.trace.path]
        assert degrees == sorted(degrees) and done.trace.balanced
    assert np.mean(regrets) < 0.01
