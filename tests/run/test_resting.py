"""Runs whose models wait in the host's memory: the same numbers, and more room for the rollout."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from runs import TINY, run_to_end

from pat_jax.common.devices import HOST_MEMORY
from pat_jax.common.rules import OptionError
from pat_jax.config.command_line import parse
from pat_jax.engine.sizing.memory import shard_bytes
from pat_jax.run.logging.metrics import read_metrics
from pat_jax.run.opened import Run
from pat_jax.run.roles import resting
from pat_jax.run.roles.resting import Rest, settled_rest
from pat_jax.run.start.setup import build
from pat_jax.training.update_memory import update_stages

PPO = "--algorithm.name ppo --algorithm.beta 0.05 --eval.every 0 --warm_start.steps 0"
REWARD = "def score(completions, **_):\n    return [len(set(x)) for x in completions]\n"


def ended(folder: Path, rest: str) -> Run:
    (reward := folder.with_suffix(".py")).write_text(REWARD)
    options = [*PPO.split(), "--layout", "dp2tp1", "--roles.rest", rest, "--run_dir", str(folder)]
    export = str(folder.parent / f"{rest}-c")
    options += ["--reward", f"{reward}:score", "--critic.export_dir", export]
    config = parse([*TINY, *options])
    setup = build(config, jax.devices()[: config.devices])
    return run_to_end(setup)


def memories(tree: Any) -> set[str]:
    """Of arrays that have a dimension."""
    return {x.sharding.memory_kind for x in jax.tree.leaves(tree) if x.ndim}


@pytest.mark.slow  # two runs; role by role `training/test_rest.py` compares the same
def test_a_run_of_three_roles_that_rest_is_the_run_of_roles_that_stay(tmp_path: Path):
    staying, rested = (ended(tmp_path / rest, rest) for rest in ("device", "host"))
    rows = [read_metrics(tmp_path / rest / "metrics.jsonl") for rest in ("device", "host")]
    learned = [
        [
            {k: v for k, v in row.items() if k.startswith(("train/", "critic/", "reward/m"))}
            for row in x
        ]
        for x in rows
    ]
    assert len(learned[0]) == 2 and "critic/loss" in learned[0][0]
    for name in ("train/mfu", "train/tokens_per_s"):  # they depend on the clock
        for row in (*learned[0], *learned[1]):
            row.pop(name, None)
    np.testing.assert_equal(learned[0], learned[1])  # for which NaN is NaN
    assert learned[0][1]["critic/grad_norm"] > 0 and learned[0][1]["train/grad_norm"] > 0
    exported = [tmp_path / f"{rest}-c" / "model.safetensors" for rest in ("device", "host")]
    assert exported[0].read_bytes() == exported[1].read_bytes()
    roles, states = rested.setup.roles, rested.learner.states
    assert roles.critic is not None and memories(states["critic"]) == {HOST_MEMORY}
    assert memories(states["train"].opt_state) == {HOST_MEMORY}
    assert memories(states["train"].params) == {"device"}
    assert memories(roles.readers["reference"].params) == {HOST_MEMORY}
    # The rollout has the memory of two moments, of a critic with two, and of the reference.
    policy, critic = (shard_bytes(x.state_in_a_step.params) for x in (roles.policy, roles.critic))
    reference = shard_bytes(roles.readers["reference"].abstract_params)
    saved = staying.setup.memory.resident - rested.setup.memory.resident
    assert saved == 2 * policy + 3 * critic + reference
    held = [
        max(stage.held for stage in update_stages(run.setup.roles)) for run in (staying, rested)
    ]
    assert held[0] > held[1]


def settled(asked: Any, room: Callable[[Rest], float], *, learns: bool = True) -> tuple[Rest, str]:
    return settled_rest(asked, jax.devices(), room, sequences=128, learns=learns)


@pytest.mark.parametrize(
    ("device", "host", "expected"),
    [(128, 300, "device"), (50, 300, "host"), (50, 100, "host"), (50, 50, "device")],
)
def test_models_rest_where_the_rollout_has_no_room_beside_them(device, host, expected):
    """Of 128 responses at full length."""
    room: dict[Rest, float] = {"device": float(device), "host": float(host)}
    found, words = settled("auto", lambda rest: room[rest])
    assert found == expected
    assert ("\n" not in words and "of 128 responses at full length" in words) == (words != "")
    assert (words != "") == (expected == "host")
    assert f"and for {device} beside" in words or not words


def test_nothing_is_decided_that_was_asked_for_or_cannot_be_known():
    def unasked(rest: Rest) -> float:
        raise AssertionError("the room is not needed")

    for rest in ("device", "host"):
        assert settled(rest, unasked) == (rest, "")
    assert settled("auto", unasked, learns=False) == ("device", "")
    assert settled("auto", lambda _: float("inf")) == ("device", "")


def test_devices_without_such_memory_are_refused(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(resting, "has_host_memory", lambda devices: False)
    output = r"roles\.rest is 'host': expected device or auto on devices of platform cpu"
    with pytest.raises(OptionError, match=output):
        settled("host", lambda _: 1.0)
    assert settled("auto", lambda _: 1.0)[0] == "device"
