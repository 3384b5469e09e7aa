"""Two processes generate with drafts, and with moves between replicas, what one does: the same tokens, from
the same drafts and moves."""

import json

import pytest
from drafted import rollouts
from runs import ROOT
from several import ends, start_all

WORKER = (str(ROOT / "tests" / "hosts" / "drafts_worker.py"),)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_two_processes_draft_and_move_as_one_does(tmp_path):
    """Copied drafts, of earlier responses as well, by samples that begin one after the other; drafts of a
    model; and requests that go to emptier replicas. Each burst, and what its rows draft from, is compared on
    the way."""
    out = tmp_path / "said"
    for code, output in ends(start_all(2, "--out", str(out), program=WORKER), timeout=800):
        assert code == 0, output
    said, expected = json.loads(out.read_text()), rollouts()
    assert said == expected
    copied, model = expected["texts"], expected["a draft model"]
    assert min(accepted for _, accepted, _ in copied["by source"]) > 0
    assert model["accepted"] > 0 and model["drafted"] > model["accepted"]
    assert copied["layouts"] == model["layouts"] == ["dp4tp1", "dp2tp2"]
    assert expected["nobody"]["moved"]
