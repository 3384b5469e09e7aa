"""The kernels of a decode step, compiled for a GPU that is not here: each costs some 2 µs."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from pat_jax.models.presets import preset
from pat_jax.profiling.cross_compile.compile import environment
from pat_jax.profiling.predict.targets import Target

WORKER = Path(__file__).parents[1] / "compiled_decode.py"
LENGTH = 2048  # of the rows that the worker's program has room for


@pytest.mark.cross_compile
@pytest.mark.parametrize(
    ("name", "a_layer", "outside"), [("qwen3-0.6b", (12, 11), 24), ("llama-3.1-8b", (16, 13), 24)]
)
def test_a_decode_step_has_few_kernels_and_copies_no_pool(name, a_layer, outside):
    target = Target.parse("h100:1")
    command = [sys.executable, str(WORKER), target.text, name]
    run = subprocess.run(command, env=environment(target), text=True, capture_output=True)
    assert run.returncode == 0, run.stderr[-2000:]
    found = {(rows, layers): rest for rows, layers, *rest in json.loads(run.stdout)}
    model = preset(name)
    for rows, most in zip((1, 64), a_layer, strict=True):
        (one, _), (three, copied) = found[rows, 1], found[rows, 3]
        of_layer = (three - one) // 2
        assert of_layer <= most and one - of_layer <= outside
        assert copied < rows * LENGTH * model.num_kv_heads * model.head_dim * 2
