"""Rows that are sent to the devices of their experts: as if one device had all experts."""

from collections import Counter
from dataclasses import replace
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fakes import fake_devices

from pat_jax.common.rules import OptionError
from pat_jax.layout.chain import layout_chain
from pat_jax.layout.exchange import buffer_rows, form_of_update, most_exchanged, round_rows
from pat_jax.layout.layout import Layout
from pat_jax.layout.mesh import ExpertSplit, factored_mesh
from pat_jax.layout.partitions import AutoPartition, ManualPartition
from pat_jax.models.config import ExpertsConfig, ModelConfig
from pat_jax.models.experts import NO_EXPERT, _compute
from pat_jax.models.partition import Partition, Rows
from pat_jax.models.presets import preset
from pat_jax.planning.types import Split
from tests.lossless import EXPERTS

EIGHT = ExpertsConfig(8, 2, 16)
CONFIG = replace(EXPERTS["moe"], experts=EIGHT)
CHAIN = {str(k): v for k, v in layout_chain(factored_mesh(jax.devices()), CONFIG)[0].items()}
SPLIT = Split(8, 1)
EMBED, DIM, K = 12, 16, 2
ROWS, LENGTH = 8, 6
COMPUTE = partial(_compute, num_experts=8)


def rows_of(chosen: np.ndarray, seed: int = 0) -> Rows:
    """Tokens that have no expert are no numbers."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(ROWS, LENGTH, EMBED)).astype(np.float32)
    x[chosen[..., 0] < 0] = np.nan
    weights = rng.uniform(0.1, 1, chosen.shape).astype(np.float32)
    return Rows(x, chosen.astype(np.int32), weights)


@cache
def experts() -> tuple[np.ndarray, ...]:
    rng = np.random.default_rng(1)
    shapes = (8, DIM, EMBED), (8, DIM, EMBED), (8, EMBED, DIM)
    return tuple(rng.normal(0, 0.4, shape).astype(np.float32) for shape in shapes)


@cache
def some_absent() -> np.ndarray:
    """Two experts of each token, of every third none."""
    rng = np.random.default_rng(2)
    chosen = np.argsort(rng.random((ROWS, LENGTH, 8)))[..., :K]
    return np.where((np.arange(LENGTH) % 3 == 0)[None, :, None], NO_EXPERT, chosen)


CHOICES = {
    "some absent": some_absent(),
    "all to two": np.broadcast_to(np.array([5, 2]), (ROWS, LENGTH, K)),
    "none": np.full((ROWS, LENGTH, K), NO_EXPERT),
}


@cache
def step(partition: Partition) -> Any:
    def loss(x: Any, weights: Any, experts: Any, chosen: Any, target: Any) -> Any:
        y = partition.by_expert(COMPUTE, Rows(x, chosen, weights), experts)
        return jnp.sum(y * target), y

    return jax.jit(jax.value_and_grad(loss, argnums=(0, 1, 2), has_aux=True))


def results(partition: Partition, chosen: np.ndarray) -> list[np.ndarray]:
    """What experts add, and the gradients of the rows, their weights and the experts."""
    rows, target = rows_of(chosen), np.random.default_rng(3).normal(size=(ROWS, LENGTH, EMBED))
    given = rows.x, rows.weights, experts(), rows.chosen, target.astype(np.float32)
    (_, y), grads = step(partition)(*given)
    return [np.asarray(x) for x in jax.tree.leaves((y, grads))]


def assert_as_on_one_device(partition: Partition, case: str) -> None:
    got, wanted = (results(each, CHOICES[case]) for each in (partition, Partition()))
    assert len(got) == 6
    for one, other in zip(got, wanted, strict=True):
        largest = np.abs(other).max()
        assert (largest > 0) == (case != "none")
        np.testing.assert_allclose(one, other, rtol=0, atol=1e-6 * largest)


@pytest.mark.parametrize("case", CHOICES)
@pytest.mark.parametrize("name", ["dp8tp1", "dp2tp4"])
def test_experts_add_what_they_do_on_one_device(name: str, case: str):
    assert_as_on_one_device(AutoPartition(CHAIN[name], exchanges=True), case)


def ragged(rows: Any, into: Any, *given: Any, axis_name: Any) -> Any:
    """`jax.lax.ragged_all_to_all` as its documentation has it, which CPUs do not have."""
    here = jax.lax.axis_index(axis_name)
    every, read, size, write = (jax.lax.all_gather(each, axis_name) for each in (rows, *given[:3]))
    at = jnp.arange(len(into))
    for source in range(len(every)):
        place = at - write[source, here]
        is_new = (place >= 0) & (place < given[3][source]) & (place < size[source, here])
        into = jnp.where(is_new[:, None], every[source, read[source, here] + place], into)
    return into


def test_the_exchange_of_accelerators_moves_the_same_rows(monkeypatch: pytest.MonkeyPatch):
    """It moves rows alone, by the sizes and places that it is given: rounds of twice the mean, there
    and back, and in the backward pass those of the gradients too."""
    monkeypatch.setattr(Layout, "platform", "tpu")
    partition, seen = AutoPartition(CHAIN["dp4tp2"], exchanges=True), Counter[tuple[int, ...]]()

    def counted(rows: Any, into: Any, *given: Any, axis_name: Any) -> Any:
        seen[into.shape] += 1
        return ragged(rows, into, *given, axis_name=axis_name)

    monkeypatch.setattr(jax.lax, "ragged_all_to_all", counted)
    assert_as_on_one_device(partition, "some absent")
    size = (
        ROWS // 4 * LENGTH * K
    )  # half of it is a device's on average, and there is room for twice
    assert round_rows(ROWS // 4 * LENGTH, K, 8, CHAIN["dp4tp2"]) == size
    assert seen == {(size, EMBED): 2 + 3}


@pytest.mark.parametrize(
    ("model", "tokens"), [("qwen3-30b-a3b", 18_432), ("qwen3-235b-a22b", 36_864)]
)
def test_tokens_are_sent_where_that_is_less_than_the_weights(model: str, tokens: int):
    """As many numbers at so many tokens of a device: 16 rows of each, 3 matrices of 128 experts."""
    found = preset(model).experts
    assert found is not None and 2 * 8 * tokens == 3 * 128 * found.expert_dim
    layout = layout_chain(factored_mesh(jax.devices()), preset(model))[0][SPLIT]
    # On a CPU every device is sent everything.
    for platform, most in (("tpu", tokens), ("gpu", tokens // 50), ("cpu", 0)):
        assert most_exchanged("auto", found, layout, platform) == most
        assert most_exchanged("gathered", found, layout, platform) == 0
        assert most_exchanged("exchanged", found, layout, platform) > 10**9
        assert most_exchanged("auto", None, layout, platform) == 0
    below, above = (form_of_update("auto", found, layout, "tpu", tokens + n) for n in (0, 1))
    assert "tokens are sent to them" in below and f"up to {tokens:,}" in below
    assert "weights are brought together" in above


def test_buffers_of_an_exchange_are_counted():
    """16,384 tokens of a device with 8 experts each: three arrays of its own rows, three of twice as
    many."""
    config = preset("qwen3-30b-a3b")
    layout = layout_chain(factored_mesh(jax.devices()), config)[0][SPLIT]
    assert config.experts is not None
    assert buffer_rows(16_384, config.experts, layout) == 9 * 16_384 * 8


@pytest.mark.parametrize(
    ("asked", "ways", "width", "parts"),
    [
        (ExpertSplit(), 4, 1, 2),
        (ExpertSplit(1), 1, 1, 8),
        (ExpertSplit(8), 8, 1, 1),
        (ExpertSplit(width=2), 2, 2, 4),
        (ExpertSplit(4, 2), 4, 2, 2),
    ],
)
def test_experts_are_divided_inside_a_host_or_as_asked(asked, ways, width, parts):
    """Two hosts of four. A training state is divided by the experts' width over the other devices."""
    chain, _ = layout_chain(factored_mesh(fake_devices(4, 4)), CONFIG, experts=asked)
    assert len(chain) == 4
    for layout in chain.values():
        assert (layout.size(layout.ep_axes), layout.size(layout.ep_width_axes)) == (ways, width)
        assert layout.spec("expert") == layout.spec("expert", role="train")
        shard = layout.sharding("expert", "expert_dim", None).shard_shape((8, DIM, EMBED))
        assert shard == (8 // ways, DIM // width, EMBED)
    most_replicas = next(iter(chain.values())).sharding("expert", "expert_dim", None, role="train")
    assert most_replicas.shard_shape((8, DIM, EMBED)) == (8 // ways, DIM // parts, EMBED)


FEW = replace(CONFIG, experts=ExpertsConfig(4, 2, 16))


@pytest.mark.parametrize(
    ("model", "asked", "words"),
    [
        (CONFIG, ExpertSplit(3), "parallel is 3: expected 0, or of 8 devices and .* 1, 2, 4, 8"),
        (FEW, ExpertSplit(8), "parallel is 8: .* the model's 4 experts of width 16 one of 1, 2, 4"),
        (
            replace(CONFIG, experts=None),
            ExpertSplit(2),
            "parallel is 2: .* without experts one of 1",
        ),
        (CONFIG, ExpertSplit(8, 2), "width is 2: expected of 8 devices and .* one of 1"),
        (
            CONFIG,
            ExpertSplit(width=3),
            "width is 3: expected of 8 devices and .* one of 1, 2, 4, 8",
        ),
    ],
)
def test_other_numbers_are_refused(model: ModelConfig, asked: ExpertSplit, words: str):
    with pytest.raises(OptionError, match=rf"^option --rollout.expert_{words}\.$"):
        layout_chain(factored_mesh(jax.devices()), model, experts=asked)


@pytest.mark.parametrize("asked", [ExpertSplit(width=2), ExpertSplit(2, 2)])
def test_a_rollout_adds_up_parts_of_experts(asked: ExpertSplit):
    """In every layout; the second has two copies of each part."""
    chosen = CHOICES["some absent"]
    wanted, given = results(Partition(), chosen)[0], (rows_of(chosen), experts())
    chain, _ = layout_chain(factored_mesh(jax.devices()), CONFIG, experts=asked)
    for layout in chain.values():
        of_units, of_down = ("expert", "expert_dim", None), ("expert", None, "expert_dim")
        of_experts = tuple(layout.spec(*axes) for axes in (of_units, of_units, of_down))
        run = jax.shard_map(
            partial(ManualPartition(layout).by_expert, COMPUTE),
            mesh=layout.mesh,
            in_specs=(layout.spec("batch"), of_experts),
            out_specs=layout.spec("batch"),
            check_vma=False,
        )
        y = jax.jit(run)(*given)
        np.testing.assert_allclose(y, wanted, rtol=0, atol=1e-6 * np.abs(wanted).max())
