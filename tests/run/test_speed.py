"""The speed of an update and the memory of devices, as they are logged."""

import logging
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rollouts import group_of

from pat_jax.common.chips import chips
from pat_jax.common.timeline import Timeline, recorded, stage
from pat_jax.config.command_line import parse
from pat_jax.models.config import ModelConfig
from pat_jax.models.policy import Policy
from pat_jax.models.presets import PRESETS, preset
from pat_jax.rl.batches.types import Prompt, RolloutGroup
from pat_jax.run.logging.speed import describe_memory, describe_update, flops_of, sequence_lengths
from pat_jax.run.logging.stage_log import log_stages
from pat_jax.run.roles.places import Places
from pat_jax.training.model_flops import matrix_weights, training_flops

SHAPE = ModelConfig("qwen3", 300, 32, 48, 2, 4, 2, 8, qk_norm=True, tie_embeddings=True)


def of_mlp(model: ModelConfig, layer: int) -> list[tuple[int, int]]:
    """Rows and columns of the matrices that a token is multiplied with behind attention."""
    experts, embed = model.experts, model.embed_dim
    if experts is None or layer in experts.dense_layers:
        return [(embed, model.mlp_dim), (embed, model.mlp_dim), (model.mlp_dim, embed)]
    units = experts.expert_dim
    one = [(embed, units), (embed, units), (units, embed)]
    return [(embed, experts.num_experts), *(experts.num_experts_per_tok * one)]


def by_hand(model: ModelConfig, length: int) -> int:
    """Multiplications and additions, matrix product by matrix product and token by token."""
    forward = 0
    for layer in range(model.num_layers):
        query, keys = model.num_heads * model.head_dim, model.num_kv_heads * model.head_dim
        for rows, columns in [
            (model.embed_dim, query),
            (model.embed_dim, keys),
            (model.embed_dim, keys),
            (query, model.embed_dim),
            *of_mlp(model, layer),
        ]:
            forward += 2 * rows * columns * length
        for position in range(length):  # scores, then values; half of itself
            forward += 2 * 2 * query * position + 2 * query
    return 3 * (forward + 2 * model.embed_dim * model.vocab_size * length)


@pytest.mark.parametrize("model", [SHAPE, preset("tiny-moe")], ids=["dense", "experts"])
@given(lengths=st.lists(st.integers(1, 40), min_size=1, max_size=5))
def test_the_arithmetic_is_that_of_each_product(model: ModelConfig, lengths: list[int]):
    expected = sum(by_hand(model, length) for length in lengths)
    assert training_flops(model, np.array(lengths)) == pytest.approx(expected, rel=1e-12)


@given(st.lists(st.tuples(st.integers(0, 30), st.integers(1, 20)), min_size=1, max_size=5))
def test_what_is_shared_is_no_arithmetic(sizes: list[tuple[int, int]]):
    shared, own = np.array(sizes).T
    expected = sum(by_hand(SHAPE, s + n) - by_hand(SHAPE, s) for s, n in sizes)
    assert training_flops(SHAPE, shared + own, shared) == pytest.approx(expected, rel=1e-12)


def test_a_frozen_weight_has_no_gradient():
    """A third of each product with weights is left out, none of attention; adapters have all three."""
    lengths, few = np.array([7, 30]), 100
    found = training_flops(SHAPE, lengths, adapter_weights=few)
    weights = 2 * matrix_weights(SHAPE) * 37
    assert found == pytest.approx(
        training_flops(SHAPE, lengths) - weights + 6 * few * 37, rel=1e-12
    )


@pytest.mark.parametrize("name", PRESETS)
def test_the_weights_of_products_are_the_matrices_of_the_model(name: str):
    model = preset(name)
    leaves = jax.tree_util.tree_leaves_with_path(Policy.from_config(model).abstract_params)
    sizes = {jax.tree_util.keystr(path): x.size for path, x in leaves if x.ndim > 1}
    if model.experts is not None:
        stacks = {
            jax.tree_util.keystr(path) for path, x in leaves if x.ndim == 3 and "mlp" in str(path)
        }
        assert len(stacks) == 3 * len(model.sparse_layers)
        for path in stacks:
            sizes[path] = (
                sizes[path] // model.experts.num_experts * model.experts.num_experts_per_tok
            )
    (embedding,) = [size for path, size in sizes.items() if "embed" in path]
    padding = model.embed_dim * (model.padded_vocab_size - model.vocab_size)
    biases = sum(size for path, size in sizes.items() if "bias" in path)
    looked_up = 0 if model.tie_embeddings else embedding
    assert matrix_weights(model) == sum(sizes.values()) - biases - looked_up - padding
    scalar = replace(model, head="scalar")
    assert matrix_weights(scalar) == matrix_weights(model) - model.embed_dim * (
        model.vocab_size - 1
    )


def groups(*lengths: int) -> list[RolloutGroup]:
    return [group_of([[0] * n for n in lengths], Prompt(0, (1, 2), "", {}))]


def fakes(kind: str, *peaks: int | None) -> list[Any]:
    def stats(peak: int | None) -> dict[str, int] | None:
        return None if peak is None else {"peak_bytes_in_use": peak}

    return [
        SimpleNamespace(
            process_index=0, device_kind=kind, memory_stats=lambda peak=peak: stats(peak)
        )
        for peak in peaks
    ]


def test_utilisation_is_a_share_of_the_peak_of_all_devices():
    devices = fakes("NVIDIA H200", None, None)
    lengths, whole = sequence_lengths(groups(8, 18)), Policy.from_config(SHAPE)
    trained: Any = SimpleNamespace(policy=whole, lora=None)
    flops = 3 * flops_of(trained, lengths)
    found = describe_update(devices, lengths, seconds=0.5, flops=flops)
    assert found["train/tokens_per_s"] == 60
    done = 3 * (by_hand(SHAPE, 10) + by_hand(SHAPE, 20)) / 0.5
    assert found["train/mfu"] == pytest.approx(done / (2 * chips()["h200"].flops_s))
    shared = np.array([0, 1])
    flops = 3 * flops_of(trained, lengths, shared)
    less = describe_update(devices, lengths, shared, seconds=0.5, flops=flops)
    assert less["train/tokens_per_s"] == 58
    done -= 3 * by_hand(SHAPE, 1) / 0.5
    assert less["train/mfu"] == pytest.approx(done / (2 * chips()["h200"].flops_s))


def test_what_a_device_does_not_say_is_no_metric():
    devices = jax.devices()
    found = describe_update(devices, sequence_lengths(groups(8)), seconds=1.0, flops=1.0)
    assert set(found) == {"train/tokens_per_s"} and describe_memory(devices) == {}
    assert describe_memory(fakes("", None, 2**30, 3 * 2**29)) == {"memory/peak_gib": 1.5}


DEVICES = jax.devices()[:4]
FIRST, SECOND = DEVICES[:2], DEVICES[2:]


@pytest.fixture
def timeline() -> Timeline:
    """Of an iteration whose scores are read while others are generated."""
    found = Timeline()
    found.add("update of the policy", SECOND, 116.0, 118.0)
    found.add("rollout", FIRST, 100.0, 110.0)
    found.add("scores of the reward model", SECOND, 104.0, 106.0)
    found.add("scores of the reward model", SECOND, 110.0, 111.0)
    found.add("log-probabilities of the policy", SECOND, 111.0, 111.001)
    found.add("weights to the rollout", DEVICES, 118.0, 120.0)
    return found


def test_the_log_has_the_seconds_of_each_stage(timeline: Timeline, caplog):
    places = Places.of(parse(("--placement", "separate")).placement, DEVICES)
    with caplog.at_level(logging.INFO):
        seconds = log_stages(timeline, places, 3)
    assert caplog.messages == [
        "step 3: rollout 10 s, scores of the reward model 3 s, update of the policy 2 s, "
        "weights to the rollout 2 s"
    ]
    assert seconds["scores of the reward model"] == pytest.approx(3.0)
    assert log_stages(timeline, places, 4) == {}


def test_stages_of_all_threads_are_recorded_until_they_are_taken():
    def read() -> None:
        with stage("scores", SECOND):
            time.sleep(0.01)

    with recorded() as timeline:
        with stage("rollout", FIRST), ThreadPoolExecutor(1) as lane:
            lane.submit(read).result()
        rollout, scores = timeline.take()
        assert (rollout.name, scores.name) == ("rollout", "scores") and scores.devices == {*SECOND}
        assert scores.end_s - scores.begin_s >= 0.01
        assert rollout.begin_s <= scores.begin_s < scores.end_s <= rollout.end_s
        assert timeline.take() == []
    with stage("rollout", FIRST):
        pass
    assert timeline.take() == []
