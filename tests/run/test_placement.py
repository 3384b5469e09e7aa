"""Runs whose models have devices of their own: the same tokens, and the same parameters."""

from pathlib import Path

import jax
import numpy as np
import pytest
from runs import TINY

from pat_jax.config.command_line import parse
from pat_jax.rl.batches.types import Rollout
from pat_jax.run.loop import Run
from pat_jax.run.process.stop_signals import StopSignals
from pat_jax.run.scoring import open_scorer
from pat_jax.run.setup import build

PPO = """
    --algorithm ppo --algorithm.whiten_advantages false --algorithm.beta 0.05 --eval.every 0 --warm_start.steps 2 --steps 3 --devices 4
    --critic.learning_rate 1e-3 --optimizer.learning_rate 1e-3 --checkpoint.every 3
"""
REWARD = "def score(completions, **_):\n    return [float(len(x) % 7) for x in completions]\n"


class Ended:
    def __init__(self, folder: Path, *options: str):
        folder.mkdir()
        (reward := folder / "reward.py").write_text(REWARD)
        words = [*TINY, *PPO.split(), "--reward", f"{reward}:score", *options]
        config = parse([*words, "--run_dir", str(folder / "run")])
        setup = build(config, jax.devices()[: config.devices])
        self.responses: list[list[Rollout]] = []
        with open_scorer(config, setup.task.rewards, setup.reward_models) as scorer:
            run = Run(setup, scorer, StopSignals())
            inner = run.update

            def update(step, experience, measured):
                self.responses.append([x for group in experience.groups for x in group.rollouts])
                inner(step, experience, measured)

            run.update = update
            run.run()
            run.open.release()
        self.setup = setup
        self.params = {
            name: [np.asarray(x) for x in jax.tree.leaves(state.params)]
            for name, state in run.learner.states.items()
        }


def devices_of(tree) -> set[int]:
    return {device.id for x in jax.tree.leaves(tree) for device in x.sharding.device_set}


@pytest.mark.slow
def test_three_iterations_of_ppo_are_the_same_in_every_placement(tmp_path: Path):
    flat = Ended(tmp_path / "flatten", "--layout", "dp2tp1", "--devices", "2")
    for name, layout, overlap in (
        ("interleave", "dp4tp1", "none"),
        ("separate", "dp2tp1", "none"),
        ("separate", "dp2tp1", "scores"),
        ("separate", "dp2tp1", "gradients"),
    ):
        options = ["--placement", name, "--layout", layout, "--placement.overlap", overlap]
        other = Ended(tmp_path / f"{name}-{overlap}", *options)
        for ours, theirs in zip(other.responses, flat.responses, strict=True):
            assert [x.tokens.tolist() for x in ours] == [x.tokens.tolist() for x in theirs]
        for role, params in flat.params.items():
            whole, there = (
                np.concatenate([*map(np.ravel, x)]) for x in (params, other.params[role])
            )
            far = np.linalg.norm(there - whole) / np.linalg.norm(whole)
            assert far <= 1e-6
