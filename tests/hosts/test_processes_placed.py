"""Runs of two processes, each of which is cut alike: the same tokens, and the same parameters."""

import pickle
from pathlib import Path

import pytest
from placed_runs import differences, ended, waited
from runs import JUDGE, ROOT, presets_of_one_layer, write_checkpoint
from several import ends, start_all

WORKER = (str(ROOT / "tests" / "hosts" / "placed_worker.py"),)
SEPARATE = "--placement separate"
RUNS = {
    "groups": "--devices 4 --layout dp4tp1 --fsdp_size 2",
    "interleave": "--devices 4 --layout dp4tp1 --placement interleave",
    "separate": f"--devices 4 --layout dp2tp1 {SEPARATE}",
}


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_two_processes_learn_what_one_learns_in_every_placement(tmp_path: Path):
    judge = write_checkpoint(tmp_path / "judge", JUDGE)
    lines = "\n".join(f"{name}:{options}" for name, options in RUNS.items())
    options = "--runs", lines, "--judge", str(judge), "--out", str(tmp_path)
    for code, output in ends(start_all(2, *options, program=WORKER), timeout=800):
        assert code == 0, output
    with presets_of_one_layer("tiny"):
        flat = ended(tmp_path / "flatten", judge, "--layout", "dp2tp1", "--devices", "2")
    for name in RUNS:
        other = pickle.loads((tmp_path / f"{name}.pickle").read_bytes())
        assert differences(other, flat) == [] and other.compiled == [], name
        assert waited(other.rows) == [[]] * len(flat.rows) != [], name
        devices = [1] if SEPARATE in RUNS[name] else [0, 1]
        assert set(map(tuple, other.devices.values())) == {tuple(devices)}, name
