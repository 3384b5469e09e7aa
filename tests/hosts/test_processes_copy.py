"""Weights of two processes come to other devices of the same processes bit for bit."""

import pytest
from runs import ROOT
from several import ends, start_all


@pytest.mark.slow  # two processes
@pytest.mark.timeout(300)
def test_two_processes_copy_weights_to_other_devices():
    worker = (str(ROOT / "tests" / "hosts" / "copying_worker.py"),)
    found = ends(start_all(2, program=worker))
    assert [code for code, _ in found] == [0, 0], found
    assert "all weights are there" in found[0][1]  # the other process prints nothing
