"""Files from before 0.1.0, which have older words for some keys."""

import json

from profiles import save_profile

from pat_jax.engine.record.trace import RolloutTrace
from pat_jax.planning.latency.profile import read_profile
from pat_jax.planning.types import Split
from pat_jax.profiling.cross_compile.compiled import CompiledProgram


def test_a_trace_with_live_sequences_is_read():
    layouts = ("dp2tp1", "dp1tp2")
    trace = RolloutTrace((0.0, 1.0), (0, 4), (8, 3), layouts, total_s=2.0, total_steps=9)
    older = trace.to_json().replace('"running"', '"live"')
    assert '"live"' in older and RolloutTrace.from_json(older) == trace


def test_a_profile_with_reslices_is_read(tmp_path):
    path = save_profile(tmp_path / "profile.json")
    profile = read_profile(path)
    path.write_text(path.read_text().replace("reshard_table", "reslice_table"))
    assert profile.latency.reshard_table and read_profile(path) == profile


def test_a_record_of_a_program_with_a_budget_is_read():
    program = CompiledProgram("reshard", Split(1, 2), num_draft_tokens=3)
    content = json.loads(json.dumps(program.to_json())) | {"name": "reslice", "budget": 3}
    del content["num_draft_tokens"]
    assert CompiledProgram.from_json(content) == program
