"""Attention to pages, compiled for TPUs that are not here."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from pat_jax.profiling.cross_compile.compile import environment
from pat_jax.profiling.predict.targets import Target

WORKER = Path(__file__).parents[1] / "compiled_pages.py"


@pytest.mark.cross_compile
@pytest.mark.parametrize("name", ["v5e:2x2", "v5p:2x2x1", "v6e:2x2"])
def test_attention_to_pages_is_one_kernel_that_copies_no_pool(name):
    target = Target.parse(name)
    command = [sys.executable, str(WORKER), target.text]
    run = subprocess.run(command, env=environment(target), text=True, capture_output=True)
    assert run.returncode == 0, run.stderr[-2000:]
    for kernels, copied in json.loads(run.stdout):
        assert kernels == 1 and copied < 0.01
