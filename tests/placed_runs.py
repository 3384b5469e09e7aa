"""Runs of PPO with a reference and a reward model, whose models have devices of their own or not."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from compilations import counted_in_iterations
from jax.experimental.multihost_utils import process_allgather
from runs import TINY, run_to_end

from pat_jax.common.owners import is_absent, known_to_all
from pat_jax.common.stopwatch import Stopwatch
from pat_jax.config.command_line import parse
from pat_jax.run.collect import Experience
from pat_jax.run.learning import Learned
from pat_jax.run.logging.metrics import read_metrics
from pat_jax.run.loop import Loop
from pat_jax.run.start.setup import build

PPO = """
    --algorithm ppo --algorithm.whiten_advantages false --algorithm.beta 0.05 --eval.every 0
    --warm_start.steps 2 --steps 3 --devices 8 --checkpoint.every 3
    --critic.learning_rate 1e-3 --optimizer.learning_rate 1e-3
"""
REWARD = "def score(completions, **_):\n    return [float(len(x) % 7) for x in completions]\n"
WAITED = ["reward/early_waited_seconds"]
SAME = "reward/mean", "reward/judge/mean", "train/loss", "critic/loss"
TRAINED = "train", "critic"


@dataclass(frozen=True)
class Ended:
    """What a run leaves. Everything is the same in every process, but for the devices."""

    tokens: list[list[list[int]]] = field(default_factory=list)  # by iteration and response
    params: dict[str, np.ndarray] = field(default_factory=dict)  # by role
    devices: dict[str, list[int]] = field(default_factory=dict)  # within a process, by role
    rows: list[dict[str, Any]] = field(default_factory=list)  # of metrics
    compiled: list[str] = field(default_factory=list)  # after the warm-up


def ended(folder: Path, judge: Path, *options: str) -> Ended:
    """Runs three iterations. The reward model's score has no weight."""
    folder.mkdir(exist_ok=True)
    (reward := folder / "reward.py").write_text(REWARD)
    rewards = ["--reward", f"{reward}:score", f"model:{judge}", "--reward_weights", "1", "0"]
    rewards += ["--critic.model", "tiny"]
    run_dir = folder / f"run-{folder.name}"
    config = parse([*TINY, *PPO.split(), *rewards, *options, "--run_dir", str(run_dir)])
    setup, found = build(config, jax.devices()[: config.devices]), Ended()
    learn = Loop.learn

    def noted(self: Loop, experience: Experience, clock: Stopwatch) -> Learned:
        responses = [x for group in experience.scored.groups for x in group.rollouts]
        found.tokens.append([x.tokens.tolist() for x in responses])
        return learn(self, experience, clock)

    with counted_in_iterations() as compiled, pytest.MonkeyPatch.context() as patch:
        patch.setattr(Loop, "learn", noted)
        run = run_to_end(setup)
    found.compiled.extend(map(str, compiled))
    for role in TRAINED:
        leaves = jax.tree.leaves(run.learner.states[role].params)
        found.params[role] = np.concatenate([_whole(x).ravel() for x in leaves])
        ours = {x.id for leaf in leaves for x in leaf.sharding.addressable_devices}
        found.devices[role] = [i for i, x in enumerate(jax.local_devices()) if x.id in ours]
    if (run_dir / "metrics.jsonl").exists():
        found.rows.extend(x for x in read_metrics(run_dir / "metrics.jsonl") if x["step"] > 0)
    return found


def differences(ours: Ended, theirs: Ended) -> list[str]:
    """What differs between two runs beyond rounding, in words."""
    found = [] if ours.tokens == theirs.tokens else ["tokens"]
    for role in TRAINED:
        gap = np.linalg.norm(ours.params[role] - theirs.params[role])
        if not gap <= 1e-6 * np.linalg.norm(theirs.params[role]):
            found.append(f"parameters of {role}: {gap}")
    for mine, other in zip(ours.rows, theirs.rows, strict=True):
        for name in SAME:
            if not np.isclose(mine[name], other[name], rtol=1e-4, atol=1e-6):
                found.append(f"{name}: {mine[name]}, {other[name]}")
    return found


def waited(rows: Sequence[dict[str, Any]]) -> list[list[str]]:
    """The metrics of what was done early, of each iteration."""
    return [sorted(x for x in row if x.endswith("early_waited_seconds")) for row in rows]


def _whole(x: jax.Array) -> np.ndarray:
    devices, found = x.sharding.device_set, np.zeros(0)
    if not is_absent(devices):
        found = np.asarray(x if x.is_fully_addressable else process_allgather(x, tiled=True))
    return known_to_all("parameters", devices, found)
