"""Roles that wait in the host's memory between their stages: where they are, and what that changes."""

from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from chex import assert_trees_all_equal
from compilations import counted_compilations
from jax.sharding import NamedSharding, PartitionSpec
from trainers import (
    CHAIN,
    LENGTH,
    ROWS,
    compile_named,
    host_weights,
    made_up_batch,
    make_trainer,
    started,
    updated,
)

from pat_jax.common.devices import HOST_MEMORY
from pat_jax.common.errors import UserError
from pat_jax.common.rules import OptionError
from pat_jax.config.optimizer import OptimizerConfig
from pat_jax.config.role_table import REFERENCE
from pat_jax.layout.layout import shard_bytes
from pat_jax.rl.algorithm.optimizer import make_optimizer
from pat_jax.rl.batches.train_batch import TrainBatch
from pat_jax.run.checkpoints.checkpoint import Checkpointer
from pat_jax.training.reader import Reader
from pat_jax.training.rest import fetched, moved
from pat_jax.training.roles import Roles
from pat_jax.training.state_placement import check_offload
from pat_jax.training.trainer import REINFORCED, Trainer
from pat_jax.training.update_memory import check_state, update_stages

LAYOUT = CHAIN["dp4tp2"]
STATE, MOMENTS = "state", "moments"


def trainer_of(**options: Any) -> Trainer:
    optimizer = make_optimizer(learning_rate=1e-3, total_steps=100, weight_decay=0.1)
    trainer = make_trainer(LAYOUT, optimizer=optimizer, predicts=True, **options)
    compile_named(trainer, "init_state", "zero_gradients", "grad", "apply", "predict")
    return trainer


@pytest.fixture(scope="module")
def staying() -> Trainer:
    return trainer_of()


@pytest.fixture(scope="module")
def resting() -> dict[str, Trainer]:
    return {rests: trainer_of(rests=rests) for rests in (MOMENTS, STATE)}


@pytest.fixture(scope="module")
def offloaded() -> Trainer:
    return trainer_of(is_offloaded=True)


def reader_of(trainer: Trainer, *, rests: bool) -> Reader:
    predictor = trainer.updates[REINFORCED].predictor
    column = "reference_logprobs"
    return Reader(column, trainer.trained, predictor, [(ROWS, LENGTH)], rests=rests)


def memories(tree: Any) -> set[str]:
    """Of arrays that have a dimension."""
    return {x.sharding.memory_kind for x in jax.tree.leaves(tree) if x.ndim}


def columns_of(batch: TrainBatch) -> list[Any]:
    return [micro.columns for mini in batch.mini_batches for micro in mini]


def at_rest(trainer: Trainer):
    return trainer.placement.ended(started(trainer))


@pytest.mark.parametrize("rests", [MOMENTS, STATE])
def test_a_role_is_in_the_host_s_memory_between_two_updates(resting, rests: str):
    trainer, where = resting[rests], HOST_MEMORY if rests == STATE else "device"
    state = at_rest(trainer)
    for _ in range(3):
        assert memories(state.opt_state) == {HOST_MEMORY} and memories(state.params) == {where}
        batch = trainer.predict(state, made_up_batch())
        assert memories(state.params) == {where}
        assert "old_logprobs" in batch.mini_batches[0][0].columns
        state, _ = trainer.update(state, batch)


@pytest.mark.parametrize("rests", [MOMENTS, STATE])
def test_updates_and_predictions_are_those_of_a_role_that_stays(resting, staying, rests: str):
    found = []
    for trainer in (staying, resting[rests]):
        state, _ = trainer.update(at_rest(trainer), made_up_batch())
        with counted_compilations() as compiled:
            for _ in range(3):
                batch = trainer.predict(state, made_up_batch())
                state, _ = trainer.update(state, batch)
        assert not compiled
        found.append(jax.device_get((state, columns_of(batch))))
    assert_trees_all_equal(*found)
    moved = jax.tree.map(lambda a, b: np.abs(a - b).max(), found[0][0].params, host_weights())
    assert min(jax.tree.leaves(moved)) > 0


def test_a_rollout_has_the_memory_of_what_rests_and_an_update_has_not(resting, staying):
    params = shard_bytes(staying.abstract_params)
    for rests, count in ((MOMENTS, 2), (STATE, 3)):
        trainer = resting[rests]
        saved = shard_bytes(staying.resident) - shard_bytes(trainer.resident)
        assert saved == count * params
        found, expected = (
            {stage.name: stage.held for stage in update_stages(Roles(x))}
            for x in (trainer, staying)
        )
        assert found == expected != {}


def test_moments_of_a_role_that_rests_may_still_come_for_steps_alone(staying: Trainer):
    trainer = trainer_of(rests=STATE, is_offloaded=True)
    ends = []
    for each in (trainer, staying):
        state = at_rest(each)
        for _ in range(2):
            state, _ = each.update(state, made_up_batch())
        ends.append(jax.device_get(state))
    assert_trees_all_equal(*ends)
    held, all_of_it = shard_bytes(trainer.held), shard_bytes(staying.held)
    assert all_of_it - held == 2 * shard_bytes(staying.abstract_params)


def updated_at_rest(trainer: Trainer, state: Any, steps: int):
    for _ in range(steps):
        state, _ = trainer.update(state, made_up_batch())
    return state


def test_a_reader_is_on_the_devices_only_while_it_reads(staying: Trainer):
    readers = [reader_of(staying, rests=rests) for rests in (False, True)]
    columns = []
    for reader in readers:
        reader.compile(by_need=False)
        reader.params = jax.device_put(host_weights(), staying.shardings)
        with counted_compilations() as compiled:
            for _ in range(2):
                batch = reader.read(made_up_batch())
        assert not compiled
        columns.append(jax.device_get(columns_of(batch)))
        where = HOST_MEMORY if reader.rests else "device"
        assert memories(reader.params) == {where}
    assert_trees_all_equal(*columns)
    size = shard_bytes(staying.abstract_params)
    assert [shard_bytes(x.resident) for x in readers] == [size, 0]
    # Of two such roles beside the policy, one at a time is on the devices.
    held = [
        {s.held for s in update_stages(Roles(with_others(x), {REFERENCE: x})) if "by the" in s.name}
        for x in readers
    ]
    assert held[0] == held[1] == {shard_bytes(staying.resident) + size}


def with_others(reader: Reader) -> Trainer:
    """The policy's trainer beside what a reader keeps on the devices."""
    return trainer_of(others=reader.resident)


def test_a_rested_state_is_one_that_updates_are_given(resting):
    """Of `started`, whose parameters are on the devices, as of one that rests."""
    trainer = resting[STATE]
    ends = [updated_at_rest(trainer, begin(trainer), 1) for begin in (started, at_rest)]
    assert_trees_all_equal(*map(jax.device_get, ends))


def test_what_moves_leaves_nothing_where_it_was():
    """Else both memories would hold it, and no room would be gained."""
    devices = LAYOUT.sharding()
    host = devices.with_memory_kind(HOST_MEMORY)
    here = jax.device_put(np.arange(8.0), devices)
    away = moved({"x": here}, {"x": host})["x"]
    assert here.is_deleted() and away.sharding.memory_kind == HOST_MEMORY
    with fetched({"x": away}, {"x": devices}) as visiting:
        np.testing.assert_array_equal(visiting["x"], np.arange(8.0))
    assert visiting["x"].is_deleted() and not away.is_deleted()


def test_buffers_of_two_arrays_are_not_freed():
    """A sharding may be written in two ways, for which JAX gives two arrays of the same buffers."""
    mesh = jax.make_mesh((4,), ("data",), devices=jax.devices()[:4])
    short, long = (
        NamedSharding(mesh, PartitionSpec(*names)) for names in (["data"], ["data", None])
    )
    there = {"x": jax.device_put(np.arange(8.0).reshape(4, 2), short)}
    with fetched(there, {"x": long}) as here:
        assert here["x"] is not there["x"]
    np.testing.assert_array_equal(moved(there, {"x": long})["x"], np.arange(8.0).reshape(4, 2))


# --- moments that rest there between steps alone --------------------------------------------------


def test_moments_rest_on_the_host_after_every_step(offloaded: Trainer):
    state = started(offloaded)
    for _ in range(3):
        assert memories(state.opt_state) == {HOST_MEMORY}
        assert memories(state.params) == {"device"}
        state, _ = updated(offloaded, state)


def test_steps_are_those_of_moments_on_devices(offloaded: Trainer, staying: Trainer):
    both = offloaded, staying
    ends = [jax.device_get(updated(each, started(each), steps=3)[0]) for each in both]
    assert_trees_all_equal(*ends)
    moved = jax.tree.map(lambda a, b: np.abs(a - b).max(), ends[0].params, host_weights())
    assert min(jax.tree.leaves(moved)) > 0


def test_they_are_not_counted_as_the_devices(offloaded: Trainer, staying: Trainer):
    moments = 2 * shard_bytes(staying.abstract_params)
    counters = 2 * 4  # of AdamW's state, on every device
    assert shard_bytes(staying.abstract_state.opt_state) == moments + counters
    assert shard_bytes(staying.resident) - shard_bytes(offloaded.resident) == moments
    for each in (staying, offloaded):
        compile_named(each, "grad", "apply")
    held = [
        {stage.name: stage.held for stage in update_stages(Roles(t))} for t in (staying, offloaded)
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
