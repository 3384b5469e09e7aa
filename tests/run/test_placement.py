"""Runs whose models have devices of their own: the same tokens, and the same parameters."""

from pathlib import Path

import pytest
from placed_runs import WAITED, differences, ended, waited
from runs import JUDGE, write_checkpoint

PLACEMENTS = ("interleave", "dp8tp1"), ("separate", "dp4tp1")


@pytest.mark.slow  # four runs; `training/test_carriers.py` and others hold each part
def test_three_iterations_of_ppo_are_the_same_in_every_placement(tmp_path: Path):
    judge = write_checkpoint(tmp_path / "judge", JUDGE)
    flat = ended(tmp_path / "flatten", judge, "--layout", "dp4tp1", "--devices", "4")
    for name, layout in PLACEMENTS:
        other = ended(tmp_path / name, judge, "--placement", name, "--layout", layout)
        assert differences(other, flat) == [] and other.compiled == []
        early = WAITED if name == "separate" else []
        assert waited(other.rows) == [early] * len(flat.rows) != []
        devices = [4, 5, 6, 7] if name == "separate" else [*range(8)]
        assert set(map(tuple, other.devices.values())) == {tuple(devices)}
