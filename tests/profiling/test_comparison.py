"""Rollouts compared: the sums add up, and the gains are those of the times."""

from dataclasses import replace

import numpy as np
import pytest
import replays
from fakes import SPLITS, made_up_machine

from pat_jax.profiling.capacity.planned import of_tail
from pat_jax.profiling.simulate.comparison import Comparison, Series, compare
from pat_jax.profiling.simulate.draw import Draw
from pat_jax.profiling.simulate.response_lengths import ResponseLengths

CAP, PROMPT, CAPACITY = 150, 10, 64
CONFIG = replace(replays.CONFIG, max_prompt_length=PROMPT)
MACHINE = made_up_machine(
    CONFIG,
    CAPACITY,
    (32, 64, 128, 160),
    (0.5, 0.4, 0.3, 0.25),
    per_row=0.05,
    reshard=0.2,
    migrate_per_token=1e-3,
)
TAIL = ResponseLengths("mine", np.array([8, 150]), np.array([15.0, 1.0]))
SERIES = Series(Draw(CAPACITY, CAP, 8, prompt_tokens=PROMPT), rollouts=2)


@pytest.fixture(scope="module")
def found() -> Comparison:
    return compare(MACHINE, TAIL, SERIES)


def test_the_time_of_a_rollout_is_that_of_its_parts(found: Comparison):
    for system in (found.adaptive, *found.static):
        parts = zip(system.prefill_s, system.decode_s, system.switch_s, strict=True)
        assert [sum(part) for part in parts] == pytest.approx(system.total_s)
        assert system.num_preempted == (0, 0)
    assert [system.name for system in found.static] == [str(split) for split in SPLITS]
    assert sum(found.adaptive.switch_s) > 0
    responses = [SERIES.workload(TAIL, n).responses for n in range(2)]
    assert found.tokens == tuple(int(lengths.sum()) for lengths in responses)
    assert found.longest == tuple(int(lengths.max()) for lengths in responses)


def test_gains_are_those_of_the_times(found: Comparison):
    best = found.best_static
    assert best.mean_s == min(system.mean_s for system in found.static)
    assert found.gain(best) == pytest.approx(1 - found.adaptive.mean_s / best.mean_s)
    assert found.gain(found.adaptive) == 0
    for trace in found.traces:  # a switch begins when a burst has ended
        assert trace.switches[0].at_s <= trace.total_s


def test_the_host_takes_its_time_for_every_sequence(found: Comparison):
    slow = compare(replace(MACHINE, host_s_per_sequence=0.01), TAIL, SERIES)
    responses = np.concatenate([SERIES.workload(TAIL, n).responses for n in range(2)])
    # Whole checks of eight steps for every sequence that is running when a burst begins.
    least = 0.01 * responses.sum()
    for slower, plain in zip(slow.static, found.static, strict=True):
        assert least <= sum(slower.total_s) - sum(plain.total_s) <= 6 * least


def test_what_limits_it_is_told(found: Comparison):
    alone = of_tail(found, MACHINE)
    assert "150 steps" in alone and "dp1tp8" in alone


def test_where_no_switch_pays_there_is_none():
    dear = dict.fromkeys(MACHINE.truth.reshard_table, 10000.0)
    machine = replace(MACHINE, truth=replace(MACHINE.truth, reshard_table=dear))
    found = compare(machine, TAIL, SERIES)
    assert not any(t.switches for t in found.traces)
