"""Several processes generate what one does: the same tokens but for near-ties, switches included."""

import pickle

import pytest
from fakes import static_run, subject
from runs import ROOT
from several import ends, start_all

from tests.lossless import CARRIES, tally
from tests.near_ties import Tally

WORKER = (str(ROOT / "tests" / "hosts" / "lossless_worker.py"),)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("count, name", [(2, "kv8"), (4, "kv2")])
def test_several_processes_say_what_one_says(tmp_path, count, name):
    """And compile nothing after the warm-up; each burst's decisions are compared on the way."""
    out = tmp_path / "said"
    processes = start_all(count, "--name", name, "--out", str(out), program=WORKER)
    for code, output in ends(processes, timeout=800):
        assert code == 0, output
    said, compiled = pickle.loads(out.read_bytes())
    assert compiled == 0
    requests, static = static_run(name, seed=0)
    for (path, carry), (completions, ways) in said.items():
        assert len(ways) == len(path) - 1 and carry in (*ways, *CARRIES[1:2])
        found = sum(tally(subject(name), requests, static, [completions]).values(), Tally())
        assert found.compared > 0.9 * found.tokens > 100
        assert found.unexplained == found.judge_disagrees == 0
        assert found.max_logprob_difference <= 1e-4
