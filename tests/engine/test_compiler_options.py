"""XLA's options for programs on GPUs: which programs have which, and what a version does that refuses them."""

import json
import logging
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pat_jax.planning.types import Split
from pat_jax.profiling.cross_compile.compile import environment
from pat_jax.profiling.predict.targets import Target
from pat_jax.programs import programs
from pat_jax.programs.programs import Key, ProgramTable, compiler_options

ONE = Split(1, 1)
DECODE, PREFILL, GRAD = (Key(name, ONE, 4, 64) for name in ("decode", "prefill", "grad"))
RESHARD, ALLOCATE, PACK = (
    Key("reshard", ONE, target=ONE),
    Key("allocate", ONE),
    Key("pack", ONE, 32),
)
BUFFERS = "xla_gpu_enable_command_buffer"


@pytest.mark.parametrize("key", [RESHARD, ALLOCATE, PACK])
def test_programs_that_run_seldom_are_not_tuned(key: Key):
    options = compiler_options(key, "gpu")
    assert options["xla_gpu_autotune_level"] == 0
    assert options["xla_gpu_experimental_enable_fusion_autotuner"] is False


def test_the_loop_of_decode_steps_is_captured_and_what_computes_on_tokens_is_tuned():
    assert "WHILE" in compiler_options(DECODE, "gpu")[BUFFERS].split(",")
    for key in (DECODE, PREFILL, GRAD):
        assert not [name for name in compiler_options(key, "gpu") if "autotune" in name]


@pytest.mark.parametrize("platform", ["cpu", "tpu", ""])
def test_other_compilers_are_given_no_options(platform: str):
    assert not any(compiler_options(key, platform) for key in (DECODE, GRAD, RESHARD))


def test_flags_of_the_user_come_first(monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", f"--xla_gpu_autotune_level=2 --{BUFFERS}=")
    assert compiler_options(RESHARD, "gpu").keys() == {
        "xla_gpu_experimental_enable_fusion_autotuner"
    }
    assert BUFFERS not in compiler_options(DECODE, "gpu")


def table_of(*keys: Key) -> ProgramTable:
    table = ProgramTable()
    sharding = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    number = jax.ShapeDtypeStruct((), jnp.float32, sharding=sharding)
    for key in keys:
        table.declare(key, lambda x, n=key.rows: x + n, number)
    return table


def test_options_reach_the_compiler_of_their_own_program(monkeypatch, tmp_path: Path):
    def dumped(key: Key, platform: str) -> dict[str, str]:
        assert platform == "cpu"
        return {"xla_dump_to": str(tmp_path)} if key.name == "decode" else {}

    monkeypatch.setattr(programs, "compiler_options", dumped)
    table = table_of(PACK, DECODE)
    table.compile(PACK)
    assert not list(tmp_path.iterdir())
    table.compile(DECODE)
    assert list(tmp_path.glob("*after_optimizations.txt"))


@pytest.mark.parametrize(
    "refused", [{"xla_gpu_is_of_another_version": 0}, {BUFFERS: "FUSION,OF_ANOTHER_VERSION"}]
)
def test_a_version_that_refuses_an_option_compiles_without_and_says_so_once(
    monkeypatch, caplog, refused: dict
):
    monkeypatch.setattr(programs, "compiler_options", lambda key, platform: refused)
    table = table_of(PACK, DECODE)
    with caplog.at_level(logging.INFO):
        assert [table[key](np.float32(1)) for key in (PACK, DECODE)] == [33, 5]
    (line,) = [x.getMessage() for x in caplog.records if "OF_ANOTHER" in x.getMessage().upper()]
    assert "without XLA options" in line


@pytest.mark.cross_compile
def test_a_burst_is_one_graph_on_a_gpu(tmp_path: Path):
    """The host starts nothing else, with drafts or without."""
    worker = Path(__file__).parents[1] / "compiled_graphs.py"
    target = Target.parse("h100:1")
    command = [sys.executable, str(worker), target.text, "qwen3-0.6b", str(tmp_path)]
    run = subprocess.run(command, env=environment(target), text=True, capture_output=True)
    assert run.returncode == 0, run.stderr[-2000:]
    assert json.loads(run.stdout) == [[0, ["kCommandBuffer"]], [3, ["kCommandBuffer"]]]
