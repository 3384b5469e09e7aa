"""Real rollouts on devices that are said to be small: nothing runs that was found not to fit."""

from dataclasses import replace

import jax
import numpy as np
import pytest
from runs import TINY
from test_lazy import DP2, TP2, MadeUpClock, made_up_step

from pat_jax.cli import parse
from pat_jax.engine.sampling import sequence_key
from pat_jax.engine.scheduler import Request
from pat_jax.memory import engine_memory
from pat_jax.planning.lengths import LengthModel
from pat_jax.planning.memory import USABLE
from pat_jax.planning.planner import CostModelPlanner
from pat_jax.profiling.hindsight import planned_regret
from pat_jax.setup import build

LONGEST = 190


@pytest.mark.slow
def test_a_rollout_leaves_a_layout_that_its_cache_outgrows():
    """Whole rows to the end: with the longest cache there is room beside half the weights only."""
    lengths = f"--rollout.min_length 64 --rollout.max_completion_length {LONGEST}"
    config = parse([*TINY, *lengths.split(), "--run_dir", "unused"])
    setup = build(config, jax.devices()[:2])
    engine, rollout = setup.engine, config.rollout
    engine.compile()
    setup.trainer.compile()
    params = setup.trainer.init(0)
    memory = engine_memory(engine, rollout)
    most = memory.ending(TP2, 8) + (memory.ending(DP2, 8) - memory.ending(TP2, 8)) / 2
    memory = replace(memory, limit=most / USABLE)
    last = memory.lengths[-1]
    assert not memory.holds(DP2, 4, last) and memory.holds(TP2, 8, last)

    warmup = MadeUpClock(engine, memory=memory)
    latency = warmup.measure(lambda layout: setup.trainer.transfer(params, layout))
    assert (DP2, 4, last) not in latency.decode_table
    assert (TP2, 8, last) in latency.decode_table
    assert made_up_step(DP2, 4) < made_up_step(TP2, 8)
    known = LengthModel.empty(LONGEST).updated(np.full(50, LONGEST), np.ones(50, bool))
    planner = CostModelPlanner((DP2, TP2), latency, known, memory=memory, is_frozen=True)
    requests = [Request((3, 4, 5), sequence_key(0, i), LONGEST, ignore_eos=True) for i in range(8)]
    start = engine.layouts[DP2]
    engine.set_weights(setup.trainer.transfer(params, start), start)
    completions, report = engine.rollout(requests, planner)
    assert [len(done.tokens) for done in completions] == [LONGEST] * 8
    assert [(s.source, s.target) for s in report.switches] == [("dp2tp1", "dp1tp2")]
    assert all(memory.holds(*burst[:3]) for burst in report.bursts)
    assert {burst[0] for burst in report.bursts} == {DP2, TP2}
    regret = planned_regret(planner, rollout, [(3, LONGEST)] * 8, report.trace(), capacity=8)
    assert 0 <= regret < 0.05
