"""Runs of two processes, each of which is cut alike: the same tokens, and the same parameters."""

import pickle
from dataclasses import replace
from pathlib import Path

import pytest
from placed_runs import WAITED, differences, waited
from runs import QWEN3, ROOT, write_checkpoint
from several import ends, start_all

WORKER = (str(ROOT / "tests" / "hosts" / "placed_worker.py"),)
RUNS = {
    "flatten": "--layout dp4tp1",
    "interleave": "--layout dp4tp1 --placement interleave",
    "none": "--layout dp2tp1 --placement separate --placement.overlap none",
}


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_two_processes_learn_the_same_in_every_placement(tmp_path: Path):
    scalar = replace(QWEN3, head="scalar", tie_embeddings=False)
    judge = write_checkpoint(tmp_path / "judge", scalar)
    lines = "\n".join(f"{name}:{options}" for name, options in RUNS.items())
    options = "--runs", lines, "--judge", str(judge), "--out", str(tmp_path)
    for code, output in ends(start_all(2, *options, program=WORKER), timeout=800):
        assert code == 0, output
    found = {name: pickle.loads((tmp_path / f"{name}.pickle").read_bytes()) for name in RUNS}
    flat = found.pop("flatten")
    for name, other in found.items():
        assert differences(other, flat) == [] and other.compiled == [], name
        assert waited(other.rows) == [WAITED.get(name, [])] * len(flat.rows) != []
        devices = [0, 1] if name == "interleave" else [1]
        assert set(map(tuple, other.devices.values())) == {tuple(devices)}, name
