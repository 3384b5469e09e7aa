"""Runs whose models have devices of their own: the same tokens, and the same parameters."""

import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from placed_runs import WAITED, differences, ended, waited
from runs import QWEN3, write_checkpoint

from pat_jax.rl.batches.train_batch import TrainBatch
from pat_jax.run.checkpoints.files import checkpoints_in
from pat_jax.run.loop import Loop
from pat_jax.training.reader import Reader

PLACEMENTS = (
    ("interleave", "dp8tp1", "scores"),
    ("separate", "dp4tp1", "none"),
    ("separate", "dp4tp1", "scores"),
)


@pytest.mark.slow  # five runs; `training/test_carriers.py` and others hold each part
def test_three_iterations_of_ppo_are_the_same_in_every_placement(tmp_path: Path):
    scalar = replace(QWEN3, head="scalar", tie_embeddings=False)
    judge = write_checkpoint(tmp_path / "judge", scalar)
    flat = ended(tmp_path / "flatten", judge, "--layout", "dp4tp1", "--devices", "4")
    for name, layout, overlap in PLACEMENTS:
        options = ["--placement", name, "--layout", layout, "--placement.overlap", overlap]
        other = ended(tmp_path / f"{name}-{overlap}", judge, *options)
        assert differences(other, flat) == [] and other.compiled == []
        early = WAITED[overlap] if name == "separate" else []
        assert waited(other.rows) == [early] * len(flat.rows) != []
        devices = [4, 5, 6, 7] if name == "separate" else [*range(8)]
        assert set(map(tuple, other.devices.values())) == {tuple(devices)}


@pytest.mark.slow  # a run; `test_early_columns.py` has an error of one lane
def test_an_error_in_a_lane_ends_the_run_and_keeps_the_last_whole_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    read, calls = Reader.read, []

    def fails_later(self: Reader, batch: TrainBatch) -> TrainBatch:
        on_lane = threading.current_thread().name.startswith("lane")
        calls.extend([self.column] * on_lane)
        if on_lane and len(read_in_step) == 2:
            raise RuntimeError("the reference has lost its device")
        return read(self, batch)

    read_in_step: list[int] = []
    update = Loop.update

    def counted(self: Loop, step: int, *rest: Any) -> None:
        update(self, step, *rest)
        read_in_step.append(step)

    monkeypatch.setattr(Reader, "read", fails_later)
    monkeypatch.setattr(Loop, "update", counted)
    scalar = replace(QWEN3, head="scalar", tie_embeddings=False)
    judge = write_checkpoint(tmp_path / "judge", scalar)
    with pytest.raises(RuntimeError, match="lost its device"):
        ended(tmp_path / "run", judge, "--placement", "separate", "--layout", "dp4tp1")
    assert calls and read_in_step == [1, 2]
    assert [x.name for x in checkpoints_in(tmp_path / "run" / "run-run" / "checkpoints")] == ["2"]
    assert not [x for x in threading.enumerate() if x.name.startswith("lane")]
