"""Real rollouts in small pools, under the planner that ships."""

from dataclasses import replace

import jax
import numpy as np
import pytest
from made_up_clock import DP2, TP2, MadeUpClock
from runs import TINY

from pat_jax.config.command_line import parse
from pat_jax.engine.device.decode.sampling import sequence_key
from pat_jax.engine.sequences.responses import Request
from pat_jax.planning.lengths.model import LengthModel
from pat_jax.planning.planner.planner import CostModelPlanner
from pat_jax.run.setup import build

LONGEST = 190


@pytest.mark.slow
def test_who_has_to_make_room_goes_where_there_is_some():
    """Three long responses in one group, whose pages hold two: the youngest moves to the other."""
    options = f"--rollout.min_length 64 --rollout.max_completion_length {LONGEST}"
    config = parse([*TINY, *options.split(), "--rollout.kv_pages", "30", "--run_dir", "unused"])
    setup = build(config, jax.devices()[:2])
    engine = setup.engine
    engine.compile()
    setup.trainer.compile()
    params = setup.trainer.init(0)
    two, three, last = (np.array(n) for n in (2, 3, LONGEST + 2))
    pages = setup.memory.pages[DP2]
    assert setup.memory.needed(two, last) < pages <= setup.memory.needed(three, last)

    warmup = MadeUpClock(engine)
    latency = warmup.measure(lambda layout: setup.trainer.transfer(params, layout))
    slower = {key: s * (1 + 2 * (key[0] == TP2)) for key, s in latency.decode_table.items()}
    latency = replace(latency, decode_table=slower)
    lengths = np.array([LONGEST] * 25 + [20] * 25)
    known = LengthModel.empty(LONGEST).updated(lengths, lengths == LONGEST)
    planner = CostModelPlanner((DP2, TP2), latency, known, memory=setup.memory, is_frozen=True)
    requests = [
        Request((3, 4, 5 + i), sequence_key(0, i), (20, LONGEST)[i % 2], ignore_eos=True)
        for i in range(8)
    ]
    start = engine.layouts[DP2]
    engine.set_weights(setup.trainer.transfer(params, start), start)
    completions, report = engine.rollout(requests, planner)
    assert [len(done.tokens) for done in completions] == [20, LONGEST] * 4
    assert report.preempted == 1 and not report.switches
