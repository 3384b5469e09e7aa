"""Bursts that verify drafts compile for GPUs and TPUs that are not there, with the kernels for pages."""

import subprocess
import sys
from pathlib import Path

import pytest

from pat_jax.profiling.cross_compile.compile import environment
from pat_jax.profiling.predict.targets import Target

PROGRAM = Path(__file__).with_name("compiled_drafts.py")


@pytest.mark.cross_compile
@pytest.mark.timeout(900)
@pytest.mark.parametrize("text", ["v5e:2x2", "h100:4"])
def test_bursts_with_drafts_compile_for_a_machine_that_is_not_there(text):
    """Each row's pages are read once for all of its tokens: by the kernel for blocks of queries."""
    root = str(PROGRAM.parents[2])
    done = subprocess.run(
        [sys.executable, str(PROGRAM), text],
        env={**environment(Target.parse(text)), "PYTHONPATH": root},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    lines = [line.split() for line in done.stdout.splitlines() if line.startswith("dp")]
    copied, said = lines[:-2], lines[-2:]
    assert len(copied) == 3  # layouts
    assert {tuple(rest) for _, *rest in copied} == {("7", "True")}
    assert [rest for _, *rest in said] == [["3", "True"]] * 2  # by first layers, by a draft model
