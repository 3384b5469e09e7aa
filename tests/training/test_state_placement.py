"""Moments that rest in the host's memory: where they are, and that nothing else is another."""

from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from chex import assert_trees_all_equal
from trainers import CHAIN, compile_named, host_weights, make_trainer, started, updated

from pat_jax.common.devices import HOST_MEMORY
from pat_jax.common.errors import UserError
from pat_jax.common.rules import OptionError
from pat_jax.config.optimizer import OptimizerConfig
from pat_jax.engine.sizing.memory import shard_bytes
from pat_jax.rl.algorithm.optimizer import make_optimizer
from pat_jax.run.checkpoints.checkpoint import Checkpointer
from pat_jax.training.roles import Roles
from pat_jax.training.state_placement import check_offload
from pat_jax.training.trainer import Trainer
from pat_jax.training.update_memory import check_state, update_stages

LAYOUT = CHAIN["dp4tp2"]


def trainer_of(*, is_offloaded: bool) -> Trainer:
    optimizer = make_optimizer(learning_rate=1e-3, total_steps=100, weight_decay=0.1)
    return make_trainer(LAYOUT, optimizer=optimizer, is_offloaded=is_offloaded)


@pytest.fixture(scope="module")
def offloaded() -> Trainer:
    return trainer_of(is_offloaded=True)


@pytest.fixture(scope="module")
def resident() -> Trainer:
    return trainer_of(is_offloaded=False)


def memories(tree: Any) -> set[str]:
    """Of arrays that have a dimension."""
    return {x.sharding.memory_kind for x in jax.tree.leaves(tree) if x.ndim}


def test_moments_rest_on_the_host_after_every_step(offloaded: Trainer):
    state = started(offloaded)
    for _ in range(3):
        assert memories(state.opt_state) == {HOST_MEMORY}
        assert memories(state.params) == {"device"}
        state, _ = updated(offloaded, state)


def test_steps_are_those_of_moments_on_devices(offloaded: Trainer, resident: Trainer):
    both = offloaded, resident
    ends = [jax.device_get(updated(each, started(each), steps=3)[0]) for each in both]
    assert_trees_all_equal(*ends)
    moved = jax.tree.map(lambda a, b: np.abs(a - b).max(), ends[0].params, host_weights())
    assert min(jax.tree.leaves(moved)) > 0


def test_they_are_not_counted_as_the_devices(offloaded: Trainer, resident: Trainer):
    moments = 2 * shard_bytes(resident.abstract_params)
    counters = 2 * 4  # of AdamW's state, on every device
    assert shard_bytes(resident.abstract_state.opt_state) == moments + counters
    assert shard_bytes(resident.resident) - shard_bytes(offloaded.resident) == moments
    for each in (resident, offloaded):
        compile_named(each, "grad", "apply")
    held = [
        {stage.name: stage.held for stage in update_stages(Roles(t))} for t in (resident, offloaded)
    ]
    step = "the optimizer's step"
    assert held[0].pop(step) == held[1].pop(step)  # they are fetched for it
    assert held[0] == {name: each + moments for name, each in held[1].items()} != {}


def test_a_limit_that_a_step_has_no_room_in_is_refused(offloaded: Trainer):
    one = shard_bytes(offloaded.abstract_params)
    need = 4 * one + 2 * 4 + 4  # parameters, gradients, two moments; counters of the state
    check_state(Roles(offloaded), need)
    with pytest.raises(UserError, match=r"gradients .*, moments in a step "):
        check_state(Roles(offloaded), need - 1)


def test_a_resumed_run_goes_on_bit_for_bit(offloaded: Trainer, tmp_path: Path):
    whole = jax.device_get(updated(offloaded, started(offloaded), steps=4)[0])
    half, _ = updated(offloaded, started(offloaded), steps=2)
    with Checkpointer(tmp_path / "checkpoints") as checkpoints:
        checkpoints.save(2, {"train": half}, {})
        checkpoints.wait()
        _, found, _ = checkpoints.restore({"train": offloaded.abstract_state})
    assert memories(found["train"].opt_state) == {HOST_MEMORY}
    assert_trees_all_equal(updated(offloaded, found["train"], steps=2)[0], whole)


def test_devices_without_such_memory_are_refused(monkeypatch: pytest.MonkeyPatch):
    config, devices = OptimizerConfig(offload=True), jax.devices()
    check_offload(config, devices)
    module = "pat_jax.training.state_placement.has_host_memory"
    monkeypatch.setattr(module, lambda devices: False)
    check_offload(OptimizerConfig(), devices)
    with pytest.raises(
        OptionError, match=r"optimizer\.offload is True: expected false on devices of"
    ):
        check_offload(config, devices)
