"""Weights that go to rollouts on other devices arrive bit for bit, in every layout there."""

from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from arrays import assert_same_bits
from chex import assert_trees_all_close
from fakes import FakeDevice
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from trainers import (
    CHAIN,
    CONFIG,
    IN_GROUPS,
    LENGTH,
    POLICY,
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
from pat_jax.models.weight_formats import WeightFormat
from pat_jax.planning.types import Split
from pat_jax.programs.programs import Key
from pat_jax.training.carrier import Carrier, carriers, copied_inside, is_whole_in_each_process
from pat_jax.training.trainer import Trainer
from tests.hlo_text import Sent, collectives


def chain(devices: slice) -> dict[Split, Layout]:
    return layout_chain(factored_mesh(jax.devices()[devices]), CONFIG)[0]


@pytest.mark.parametrize(
    ("source", "target", "kept"),
    [
        (slice(4, 8), slice(0, 4), "auto"),
        (slice(6, 8), slice(0, 4), "auto"),  # tp4 is sent as tp2
        (slice(4, 8), slice(0, 2), "fp8"),
        (slice(7, 8), slice(0, 4), "auto"),
    ],
)
def test_weights_for_other_devices_arrive_bit_for_bit(source, target, kept):
    ours, theirs = chain(source), chain(target)
    dtype = jnp.bfloat16 if kept == "fp8" else jnp.float32
    trainer = make_trainer(
        next(iter(ours.values())),
        dtype=dtype,
        weights=kept,
        targets=tuple(theirs.values()),
        carriers=carriers(ours, theirs),
    )
    params = jax.device_put(host_weights(), trainer.shardings)
    policy = POLICY.with_weights(kept)
    wanted = policy.store(host_weights(), dtype)
    for layout in theirs.values():
        received = trainer.transfer(params, layout)
        assert_same_bits(received, wanted)
        assert jax.tree.map(lambda x: x.sharding, received) == layout.param_shardings(policy)
    assert_same_bits(params, host_weights())


def spreading(inside: int, kept: WeightFormat = "auto", dtype: Any = jnp.float32) -> Trainer:
    """A trainer on half of the rollout's devices, as where processes of their own have the policy.
    The devices of a host, so many, divide what is sent."""
    ours, theirs = chain(slice(0, 4)), chain(slice(0, 8))
    source, target = (
        next(iter(layout_chain(each.mesh, CONFIG, fsdp_size=inside)[0].values()))
        for each in (next(iter(ours.values())), next(iter(theirs.values())))
    )
    return make_trainer(
        next(iter(ours.values())),
        dtype=dtype,
        weights=kept,
        targets=tuple(theirs.values()),
        carriers=dict.fromkeys(theirs, Carrier(source, target, spreads=True)),
    )


@pytest.mark.parametrize(("kept", "inside"), [("auto", 2), ("fp8", 2), ("int8", 4)])
def test_weights_of_half_of_the_devices_arrive_on_all(kept: WeightFormat, inside: int):
    theirs, dtype = chain(slice(0, 8)), jnp.float32 if kept == "auto" else jnp.bfloat16
    trainer = spreading(inside, kept, dtype)
    params = jax.device_put(host_weights(), trainer.shardings)
    policy = POLICY.with_weights(kept)
    for layout in theirs.values():
        received = trainer.transfer(params, layout)
        assert_same_bits(received, policy.store(host_weights(), dtype))
        assert jax.tree.map(lambda x: x.sharding, received) == layout.param_shardings(policy)


def test_weights_are_sent_with_the_most_tp_that_both_have():
    ours, theirs = chain(slice(6, 8)), chain(slice(0, 4))
    found = {str(to): str(each.source) for to, each in carriers(ours, theirs).items()}
    assert found == {"dp4tp1": "dp2tp1", "dp2tp2": "dp1tp2", "dp1tp4": "dp1tp2"}
    back = {str(to): str(each.source) for to, each in carriers(theirs, ours).items()}
    assert back == {"dp2tp1": "dp4tp1", "dp1tp2": "dp2tp2"}


def test_processes_send_degrees_of_which_each_has_all_shards():
    """Of two processes with four devices each, half of which do rollouts."""
    devices = [FakeDevice(i, i // 4) for i in range(8)]
    theirs, ours = (
        layout_chain(factored_mesh([devices[i] for i in places]), CONFIG)[0]
        for places in ((0, 1, 4, 5), (2, 3, 6, 7))
    )
    found = {str(to): str(each.source) for to, each in carriers(ours, theirs).items()}
    assert found == {"dp4tp1": "dp4tp1", "dp2tp2": "dp2tp2", "dp1tp4": "dp2tp2"}
    of_processes = {str(to): is_whole_in_each_process(each) for to, each in ours.items()}
    assert of_processes == {"dp4tp1": True, "dp2tp2": True, "dp1tp4": False}


@pytest.mark.parametrize("target", ["dp4tp1", "dp2tp2", "dp1tp4"])
def test_each_host_is_sent_the_weights_once(target: str):
    """Of two hosts, each with two devices of the trainer: those that it has not, for all of its
    devices together."""
    ours, theirs = chain(slice(4, 8)), chain(slice(0, 4))
    given = carriers(ours, theirs)
    layouts = {str(split): layout for split, layout in theirs.items()}
    trainer = make_trainer(
        next(iter(ours.values())), targets=tuple(theirs.values()), carriers=given
    )
    key = Key("transfer", trainer.layout.split, target=layouts[target].split)
    text = trainer.programs.lower(key).compile().as_text()
    assert text is not None
    sent = sum(each.leaving(2) for each in collectives(text, per_host=2))
    weights = sum(x.nbytes for x in jax.tree.leaves(host_weights()))
    assert 0.4 * weights < sent <= 1.05 * weights / 2


@pytest.mark.parametrize("target", ["dp8tp1", "dp4tp2", "dp2tp4"])
def test_hosts_without_the_policy_are_sent_the_weights_once(target: str):
    """Of four hosts with two devices each, two have the policy."""
    trainer, weights = spreading(2), sum(x.nbytes for x in jax.tree.leaves(host_weights()))
    split = next(each for each in chain(slice(0, 8)) if str(each) == target)
    sent = []
    for name in ("transfer", "arrive"):
        key = Key(name, trainer.layout.split, target=split)
        text = trainer.programs.lower(key).compile().as_text()
        assert text is not None
        sent.append(sum(each.leaving(2) for each in collectives(text, per_host=2)))
    assert 0.4 * weights < sent[0] <= 1.05 * weights / 2  # what the other host lacks
    assert 0.9 * weights < sent[1] <= 1.05 * weights


def test_devices_that_received_a_wider_shard_drop_the_rest_without_a_collective():
    ours, theirs = chain(slice(6, 8)), chain(slice(0, 4))
    trainer = make_trainer(
        next(iter(ours.values())),
        targets=tuple(theirs.values()),
        carriers=carriers(ours, theirs),
    )
    key = Key("arrive", trainer.layout.split, target=Split(1, 4))
    text = trainer.programs.lower(key).compile().as_text()
    assert text is not None and "all-" not in text and "permute" not in text


def test_shards_are_copied_inside_a_process_as_jax_does_it():
    ours, theirs = chain(slice(4, 8)), chain(slice(0, 4))
    for split, layout in ours.items():
        shardings = theirs[split].param_shardings(POLICY)
        sent = jax.device_put(host_weights(), layout.param_shardings(POLICY))
        leaves, structure = jax.tree.flatten(sent)
        there = copied_inside(leaves, jax.tree.leaves(shardings))
        received = jax.tree.unflatten(structure, there)
        assert_same_bits(received, host_weights())
        assert jax.tree.map(lambda x: x.sharding, received) == shardings


def test_devices_that_hold_a_shard_keep_its_buffer():
    devices = jax.devices()
    source = NamedSharding(Mesh(np.array(devices[:4]).reshape(2, 2), ("a", "b")), P("b"))
    target = NamedSharding(Mesh(np.array([devices[2], devices[7]]), ("b",)), P("b"))
    array = jax.device_put(jnp.arange(8.0), source)
    (copied,) = copied_inside([array], [target])
    np.testing.assert_array_equal(copied, array)
    assert copied.sharding == target
    before = {x.device: x.data.unsafe_buffer_pointer() for x in array.addressable_shards}
    after = {x.device: x.data.unsafe_buffer_pointer() for x in copied.addressable_shards}
    assert after[devices[2]] == before[devices[2]] and len(after) == 2


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
