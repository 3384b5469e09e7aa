"""Devices in FSDP groups: the update of a single device, with one sum over groups for each step."""

from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from chex import assert_trees_all_close
from trainers import (
    CHAIN,
    CONFIG,
    IN_GROUPS,
    LENGTH,
    ROWS,
    SINGLE,
    compile_named,
    host_weights,
    make_trainer,
    started,
    updated,
)

from pat_jax.common.rules import OptionError
from pat_jax.layout.chain import layout_chain
from pat_jax.layout.layout import Layout
from pat_jax.layout.mesh import factored_mesh
from pat_jax.models.policy import Params
from pat_jax.programs.programs import Key
from pat_jax.training.trainer import Trainer
from tests.hlo_text import Sent, collectives


def trainer_in(layout: Layout, **options: Any) -> Trainer:
    # Plain descent: parameters move as their gradients say, not by their signs alone.
    return make_trainer(layout, optimizer=optax.sgd(1.0), **options)


def after_two_steps(layout: Layout, **options: Any) -> tuple[dict[str, float], Params]:
    """Metrics of the second step, and how far both have moved the parameters."""
    trainer = trainer_in(layout, **options)
    state, result = updated(trainer, started(trainer), steps=2)
    moved = jax.tree.map(np.subtract, jax.device_get(state.params), host_weights())
    return result.metrics, moved


@cache
def single() -> tuple[dict[str, float], Params]:
    return after_two_steps(SINGLE)


@pytest.mark.parametrize(
    "size", [2, *(pytest.param(size, marks=pytest.mark.slow) for size in (1, 4))]
)
def test_an_update_is_that_of_a_single_device(size: int):
    metrics, moved = after_two_steps(IN_GROUPS[size])
    expected, expected_moved = single()
    assert metrics.keys() == expected.keys() and expected["train/loss"] != 0
    for name, value in expected.items():
        assert metrics[name] == pytest.approx(value, rel=5e-5, abs=2e-6), name
    assert_trees_all_close(moved, expected_moved, rtol=5e-4, atol=5e-6)
    assert min(np.abs(x).max() for x in jax.tree.leaves(moved)) > 1e-4


def sent(trainer: Trainer, key: Key) -> list[Sent]:
    """What a program sends if four devices are a host."""
    compile_named(trainer, key.name)
    return collectives(trainer.programs[key].as_text(), per_host=4)


def test_gradients_go_between_groups_once_a_step():
    """Two hosts of four devices, each with all parameters."""
    layout = IN_GROUPS[4]
    trainer = trainer_in(layout, targets=())
    weights = sum(x.size for x in jax.tree.leaves(host_weights()))
    of_pass = sent(trainer, Key("grad", layout.split, ROWS, LENGTH))
    assert {one.kind for one in of_pass if one.hosts == 1} >= {"all-gather", "all-reduce"}
    assert sum(one.num_bytes for one in of_pass if one.hosts == 2) < 1000  # of metrics
    of_step = [one for one in sent(trainer, Key("apply", layout.split)) if one.hosts == 2]
    assert {(one.kind, one.group) for one in of_step} == {("all-reduce", 2)}
    num_bytes = sum(one.num_bytes for one in of_step)
    # What is too small to be divided is whole on each device.
    assert weights / 4 * 4 <= num_bytes < 1.2 * weights


def test_groups_send_gradients_in_the_dtype_of_products():
    _, moved = after_two_steps(IN_GROUPS[2], compute_dtype=jnp.bfloat16)
    _, expected = single()
    for ours, theirs in zip(*map(jax.tree.leaves, (moved, expected)), strict=True):
        far = np.abs(ours - theirs).max() / np.abs(theirs).max()
        assert 2**-14 < far < 2**-6


@pytest.mark.parametrize("name", ["dp4tp2", pytest.param("dp8tp1", marks=pytest.mark.slow)])
def test_a_rollout_gets_parameters_of_groups(name: str):
    chain = layout_chain(factored_mesh(jax.devices()), CONFIG, fsdp_size=4)[0]
    layout = next(x for x in chain.values() if str(x) == name)
    trainer = make_trainer(layout, targets=[target := CHAIN["dp2tp4"]])
    transferred = trainer.transfer(jax.device_put(host_weights(), trainer.shardings), target)
    assert_trees_all_close(jax.device_get(transferred), host_weights())


def test_groups_with_tp_sum_in_each_micro_batch():
    """XLA cannot divide such products inside a group."""
    chain = layout_chain(factored_mesh(jax.devices()), CONFIG, fsdp_size=4)[0]
    layout = next(x for x in chain.values() if str(x) == "dp4tp2")
    metrics, moved = after_two_steps(layout)
    assert metrics["train/loss"] == pytest.approx(single()[0]["train/loss"], rel=5e-5, abs=2e-6)
    assert_trees_all_close(moved, single()[1], rtol=5e-4, atol=5e-6)


@pytest.mark.parametrize("size", [3, 5])
def test_parts_that_are_no_run_of_axes_are_refused(size: int):
    expected = "expected 0, or of 8 devices one of 1, 2, 4, 8"
    with pytest.raises(OptionError, match=rf"--fsdp_size is {size}: {expected}"):
        layout_chain(factored_mesh(jax.devices()), CONFIG, fsdp_size=size)
