"""Rollouts compared: the sums add up, and the gains are those of the times."""

from dataclasses import replace

import numpy as np
import pytest
import replays
from fakes import SPLITS, made_up_machine

from pat_jax.profiling.capacity.limits import limits
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
        assert system.parts.total_s == pytest.approx(sum(system.decode_s))
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
    assert 0 < found.worst_gain <= max(found.gain(best), 1 - 1e-9)
    assert found.gain(found.adaptive) == 0
    first = [trace.switches[0].at_s for trace in found.traces]
    after = sum(found.adaptive.total_s) - sum(first)
    assert found.share_after_switch == pytest.approx(after / sum(found.adaptive.total_s))
    for trace in found.traces:  # a switch begins when a burst has ended
        assert trace.switches[0].at_s <= trace.total_s


def test_sums_and_host_are_told_apart():
    host = replace(MACHINE, host_s_per_sequence=0.01)
    found = compare(host, TAIL, SERIES, lambda split, rows: 0.01 * rows * (split.tp > 1))
    for system in found.static:
        assert (system.parts.sums > 0) == (system.name != "dp8tp1")
        assert system.parts.total_s == pytest.approx(sum(system.decode_s))
        workloads = [SERIES.workload(TAIL, n).responses for n in range(2)]
        # Whole checks of eight steps for every sequence that is running when a burst begins.
        least = 0.01 * sum(responses.sum() for responses in workloads)
        assert least <= system.parts.host <= 6 * least
    plain = compare(MACHINE, TAIL, SERIES)
    slower = [a.mean_s - b.mean_s for a, b in zip(found.static, plain.static, strict=True)]
    host_s = [system.parts.host / 2 for system in found.static]
    assert slower == pytest.approx(host_s)


def test_where_no_switch_pays_it_says_so():
    dear = dict.fromkeys(MACHINE.truth.reshard_table, 10000.0)
    machine = replace(MACHINE, truth=replace(MACHINE.truth, reshard_table=dear))
    found = compare(machine, TAIL, SERIES)
    assert found.share_after_switch == 0 and not any(t.switches for t in found.traces)
    assert any(line.startswith("No switch pays") for line in limits(found, machine))
