"""Runs whose models have devices of their own: the same tokens, and the same parameters."""

import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from compilations import counted_in_iterations
from runs import QWEN3, TINY, write_checkpoint

from pat_jax.config.command_line import parse
from pat_jax.rl.batches.batches import TrainBatch
from pat_jax.rl.batches.types import Rollout
from pat_jax.run.checkpoints.files import checkpoints_in
from pat_jax.run.logging.metrics import read_metrics
from pat_jax.run.loop import Run
from pat_jax.run.process.stop_signals import StopSignals
from pat_jax.run.scoring import open_scorer
from pat_jax.run.setup import build
from pat_jax.training.reader import Reader

PPO = """
    --algorithm ppo --algorithm.whiten_advantages false --algorithm.beta 0.05 --eval.every 0
    --warm_start.steps 2 --steps 3 --devices 8 --checkpoint.every 3
    --critic.learning_rate 1e-3 --optimizer.learning_rate 1e-3
"""
REWARD = "def score(completions, **_):\n    return [float(len(x) % 7) for x in completions]\n"
PLACEMENTS = (
    ("interleave", "dp8tp1", "scores"),
    ("separate", "dp4tp1", "none"),
    ("separate", "dp4tp1", "scores"),
    ("separate", "dp4tp1", "gradients"),
)
WAITED = {"scores": ["reward/early_waited_seconds"], "none": []}
WAITED["gradients"] = [*WAITED["scores"], "train/early_waited_seconds"]


class Ended:
    """A run of PPO with a reference and a reward model, whose score has no weight."""

    def __init__(self, folder: Path, judge: Path, *options: str):
        folder.mkdir()
        (reward := folder / "reward.py").write_text(REWARD)
        rewards = ["--reward", f"{reward}:score", f"model:{judge}", "--reward_weights", "1", "0"]
        rewards += ["--critic.model", "tiny"]
        config = parse([*TINY, *PPO.split(), *rewards, *options, "--run_dir", str(folder / "run")])
        setup = build(config, jax.devices()[: config.devices])
        self.responses: list[list[Rollout]] = []
        with open_scorer(config, setup.task.rewards, setup.reward_models) as scorer:
            run = Run(setup, scorer, StopSignals())
            learn = run.update

            def update(step: int, experience: Any, measured: dict[str, Any]) -> None:
                self.responses.append([x for group in experience.groups for x in group.rollouts])
                learn(step, experience, measured)

            run.update = update
            with counted_in_iterations() as self.compiled:
                run.run()
            run.open.release()
        self.states, self.setup = run.learner.states, setup
        self.rows = [x for x in read_metrics(folder / "run" / "metrics.jsonl") if x["step"] > 0]

    def params(self, role: str) -> np.ndarray:
        leaves = jax.tree.leaves(self.states[role].params)
        return np.concatenate([np.ravel(np.asarray(x)) for x in leaves])

    def devices(self, role: str) -> set[int]:
        leaves = jax.tree.leaves(self.states[role].params)
        return {device.id for x in leaves for device in x.sharding.device_set}


@pytest.mark.slow  # five runs; `training/test_carriers.py` and others hold each part
def test_three_iterations_of_ppo_are_the_same_in_every_placement(tmp_path: Path):
    scalar = replace(QWEN3, head="scalar", tie_embeddings=False)
    judge = write_checkpoint(tmp_path / "judge", scalar)
    flat = Ended(tmp_path / "flatten", judge, "--layout", "dp4tp1", "--devices", "4")
    for name, layout, overlap in PLACEMENTS:
        options = ["--placement", name, "--layout", layout, "--placement.overlap", overlap]
        other = Ended(tmp_path / f"{name}-{overlap}", judge, *options)
        for ours, theirs in zip(other.responses, flat.responses, strict=True):
            assert [x.tokens.tolist() for x in ours] == [x.tokens.tolist() for x in theirs]
        for role in ("train", "critic"):
            ours, theirs = other.params(role), flat.params(role)
            assert np.linalg.norm(ours - theirs) <= 1e-6 * np.linalg.norm(theirs)
            assert other.devices(role) == ({4, 5, 6, 7} if name == "separate" else {*range(8)})
        for ours, theirs in zip(other.rows, flat.rows, strict=True):
            for metric in ("reward/mean", "reward/judge/mean", "train/loss", "critic/loss"):
                assert ours[metric] == pytest.approx(theirs[metric], rel=1e-4, abs=1e-6), metric
            found = sorted(x for x in ours if x.endswith("early_waited_seconds"))
            assert found == (WAITED[overlap] if name == "separate" else [])
        assert other.compiled == []


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
    update = Run.update

    def counted(self: Run, step: int, *rest: Any) -> None:
        update(self, step, *rest)
        read_in_step.append(step)

    monkeypatch.setattr(Reader, "read", fails_later)
    monkeypatch.setattr(Run, "update", counted)
    scalar = replace(QWEN3, head="scalar", tie_embeddings=False)
    judge = write_checkpoint(tmp_path / "judge", scalar)
    with pytest.raises(RuntimeError, match="lost its device"):
        Ended(tmp_path / "run", judge, "--placement", "separate", "--layout", "dp4tp1")
    assert calls and read_in_step == [1, 2]
    assert [x.name for x in checkpoints_in(tmp_path / "run" / "run" / "checkpoints")] == ["2"]
    assert not [x for x in threading.enumerate() if x.name.startswith("lane")]
