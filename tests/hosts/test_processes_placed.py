"""Runs of two processes, each of which is cut alike: the same tokens, and the same parameters."""

import pickle
from dataclasses import replace
from pathlib import Path

import pytest
from placed_runs import WAITED, differences, ended, waited
from runs import QWEN3, ROOT, presets_of_one_layer, write_checkpoint
from several import SMALL, ends, errors, start_all

WORKER = (str(ROOT / "tests" / "hosts" / "placed_worker.py"),)
SEPARATE = "--placement separate"
RUNS = {
    "groups": "--devices 4 --layout dp4tp1 --fsdp_size 2",
    "interleave": "--devices 4 --layout dp4tp1 --placement interleave",
    "scores": f"--devices 4 --layout dp2tp1 {SEPARATE}",
    "gradients": f"--devices 4 --layout dp2tp1 {SEPARATE} --placement.overlap gradients",
}


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_two_processes_learn_what_one_learns_in_every_placement(tmp_path: Path):
    scalar = replace(QWEN3, head="scalar", tie_embeddings=False)
    judge = write_checkpoint(tmp_path / "judge", scalar)
    lines = "\n".join(f"{name}:{options}" for name, options in RUNS.items())
    options = "--runs", lines, "--judge", str(judge), "--out", str(tmp_path)
    for code, output in ends(start_all(2, *options, program=WORKER), timeout=800):
        assert code == 0, output
    with presets_of_one_layer("tiny"):
        flat = ended(tmp_path / "flatten", judge, "--layout", "dp2tp1", "--devices", "2")
    for name in RUNS:
        other = pickle.loads((tmp_path / f"{name}.pickle").read_bytes())
        assert differences(other, flat) == [] and other.compiled == [], name
        assert waited(other.rows) == [WAITED.get(name, [])] * len(flat.rows) != [], name
        devices = [1] if SEPARATE in RUNS[name] else [0, 1]
        assert set(map(tuple, other.devices.values())) == {tuple(devices)}, name


# The thread beside the main one comes to this for the second time.
FAILS = """
import os, signal
import jax
from pat_jax import train
from pat_jax.common.run_command import run_command
from {module} import {of}

def failing(self, *given, do={of}.{method}, calls=[]):
    calls.append(1)
    if jax.process_index() == {index} and len(calls) == 2:
        {how}
    return do(self, *given)

{of}.{method} = failing
run_command(train.main)
"""
READS = {"module": "pat_jax.training.reader", "of": "Reader", "method": "read"}
SUMS = {"module": "pat_jax.training.summed_gradients", "of": "SummedGradients", "method": "add"}
RAISES, DIES = 'raise OSError("no device")', "os.kill(os.getpid(), signal.SIGKILL)"


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("gone", "how", "where"),
    [
        *((0, RAISES, READS), (1, RAISES, READS), (1, DIES, READS), (1, RAISES, SUMS)),
    ],
)
def test_where_a_lane_of_one_fails_both_end_with_a_sentence(
    tmp_path: Path, gone: int, how: str, where: dict[str, str]
):
    options = [*SMALL, "--eval.every", "0", "--steps", "1000", "--algorithm.beta", "0.1"]
    options += ["--placement", "separate", "--run_dir", str(tmp_path / "run")]
    options += ["--placement.overlap", "gradients"] * (where is SUMS)
    program = "-c", FAILS.format(index=gone, how=how, **where)
    found = ends(start_all(2, *options, program=program))
    code, output = found[1 - gone]
    sentences = errors(output)
    assert len(sentences) == 1, output
    (sentence,) = sentences
    assert code == 1 and f"process {gone}" in sentence and "Traceback" not in output, output
    if how == RAISES:
        code, output = found[gone]
        assert code == 1 and errors(output) == ["error: OSError: no device"], output
        assert sentence.endswith("OSError: no device")
