"""Several processes generate what one does: with switches the same tokens but for near-ties; with drafts and
with moves between replicas the same tokens, from the same drafts and moves."""

import pickle

import pytest
from drafted import rollouts
from fakes import static_run, subject
from runs import ROOT
from several import ends, start_all

from tests.lossless import CARRIES, tally
from tests.near_ties import Tally

WORKER = (str(ROOT / "tests" / "hosts" / "generating_worker.py"),)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("count, name", [(2, "kv8"), (4, "kv2")])
def test_several_processes_say_what_one_says(tmp_path, count, name):
    """And compile nothing after the warm-up; each burst's decisions are compared on the way."""
    out = tmp_path / "said"
    processes = start_all(count, "--what", name, "--out", str(out), program=WORKER)
    for code, output in ends(processes, timeout=800):
        assert code == 0, output
    generated, compiled = pickle.loads(out.read_bytes())
    assert compiled == 0
    requests, static = static_run(name, seed=0)
    for (path, carry), (completions, ways) in generated.items():
        assert len(ways) == len(path) - 1 and carry in (*ways, *CARRIES[1:2])
        found = sum(tally(subject(name), requests, static, [completions]).values(), Tally())
        assert found.compared > 0.9 * found.tokens > 100
        assert found.unexplained == found.judge_disagrees == 0
        assert found.max_logprob_difference <= 1e-4


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_two_processes_draft_and_move_as_one_does(tmp_path):
    """Copied drafts, of earlier responses as well, by samples that begin one after the other; drafts of a
    model; and requests that go to emptier replicas. Each burst, and what its rows draft from, is compared on
    the way."""
    out = tmp_path / "said"
    for code, output in ends(
        start_all(2, "--what", "drafts", "--out", str(out), program=WORKER), timeout=800
    ):
        assert code == 0, output
    generated, expected = pickle.loads(out.read_bytes()), rollouts()
    assert generated == expected
    copied, model = expected["texts"], expected["a draft model"]
    assert min(accepted for _, accepted, _ in copied["by source"]) > 0
    assert model["accepted"] > 0 and model["drafted"] > model["accepted"]
    assert copied["layouts"] == model["layouts"] == ["dp4tp1", "dp2tp2"]
    assert expected["nobody"]["moved"]
