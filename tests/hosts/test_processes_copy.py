"""Weights of two processes come to other devices of the same processes bit for bit."""

import pytest
from runs import ROOT
from several import ends, start_all


@pytest.mark.slow  # two processes
@pytest.mark.timeout(300)
def test_two_processes_copy_weights_to_other_devices():
    worker = (str(ROOT / "tests" / "hosts" / "copying_worker.py"),)
    for code, output in ends(start_all(2, program=worker)):
        assert code == 0 and "all weights are there" in output, output
