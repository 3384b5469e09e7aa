"""The questions to kernels compile for GPUs and TPUs that are not there."""

import subprocess
import sys
from pathlib import Path

import pytest

from pat_jax.profiling.cross_compile.compile import environment
from pat_jax.profiling.predict.targets import Target

PROGRAM = Path(__file__).with_name("compiled_kernel_checks.py")
CASES = ("decode", "prefill", "verify", "rows forward", "rows backward")


@pytest.mark.cross_compile
@pytest.mark.parametrize("text", ["v5e:2x4", "h100:8"])
def test_every_kernel_is_asked_in_programs_that_compile(text):
    """At the shapes of the narrowest layout and of the widest."""
    root = str(PROGRAM.parents[2])
    done = subprocess.run(
        [sys.executable, str(PROGRAM), text],
        env={**environment(Target.parse(text)), "PYTHONPATH": root},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.splitlines() == [f"{name}: True" for name in CASES] * 2
