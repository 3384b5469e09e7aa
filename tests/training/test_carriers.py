"""Weights that go to rollouts on other devices arrive bit for bit, in every layout there."""

import jax
import jax.numpy as jnp
import pytest
from arrays import assert_same_bits
from trainers import CONFIG, POLICY, host_weights, make_trainer

from pat_jax.layout.layout import Layout, factored_mesh, layout_chain
from pat_jax.models.weight_formats import WeightFormat
from pat_jax.planning.types import Split
from pat_jax.programs.programs import Key
from pat_jax.training.carrier import carriers


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
def test_weights_for_other_devices_arrive_bit_for_bit(
    source: slice, target: slice, kept: WeightFormat
):
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


def test_weights_are_sent_with_the_most_tp_that_both_have():
    ours, theirs = chain(slice(6, 8)), chain(slice(0, 4))
    found = {str(to): str(each.source) for to, each in carriers(ours, theirs).items()}
    assert found == {"dp4tp1": "dp2tp1", "dp2tp2": "dp1tp2", "dp1tp4": "dp1tp2"}
    back = {str(to): str(each.source) for to, each in carriers(theirs, ours).items()}
    assert back == {"dp2tp1": "dp4tp1", "dp1tp2": "dp2tp2"}


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
