"""In which order axes of devices come, what is refused, and heads that devices do not divide."""

import itertools
import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import permutations, product
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fakes import SPLITS, fake_devices
from hypothesis import given
from hypothesis import strategies as st

from pat_jax.common.errors import UserError
from pat_jax.layout.buckets import Buckets, ladder
from pat_jax.layout.chain import find_layout, layout_chain
from pat_jax.layout.division import MOST_PADDING, degrees_of, prime_factors
from pat_jax.layout.mesh import factored_mesh, padded_for
from pat_jax.models.checkpoints.hf_export import export
from pat_jax.models.checkpoints.hf_load import load_params
from pat_jax.models.checkpoints.peft_adapter import export_adapter, load_adapter, read_adapter
from pat_jax.models.config import ModelConfig
from pat_jax.models.lora import Lora
from pat_jax.models.policy import Params, Policy
from pat_jax.models.presets import preset
from pat_jax.planning.types import Split
from pat_jax.rl.algorithm.optimizer import make_optimizer
from pat_jax.training.checksum import base_checksum
from tests.bucket_limits import BucketLimits
from tests.lossless import MODELS, Settings, Subject, lively_params, make_requests, pad
from tests.near_ties import check_lossless

CONFIG = ModelConfig("qwen2", 720, 16, 720, 1, 8, 8, 4, vocab_multiple=720)


def heads(num_heads: int, num_kv_heads: int, **more: int) -> ModelConfig:
    return replace(CONFIG, num_heads=num_heads, num_kv_heads=num_kv_heads, **more)


@given(
    st.sampled_from([(6,), (8,), (12,), (18,), (30,), (36,), (2, 2, 2), (6, 6), (12, 12, 12)]),
    st.sampled_from([1, 2, 3, 4, 6, 8, 10]),
    st.sampled_from([1, 2, 3, 5, 6, 7, 9]),
    st.sampled_from([12, 64, 96, 720]),
)
def test_no_order_has_more_layouts(per_host, kv_heads, queries, mlp_dim):
    config = heads(kv_heads * queries, kv_heads, mlp_dim=mlp_dim)
    chain, _ = layout_chain(factored_mesh(fake_devices(*per_host)), config)
    across, inside = prime_factors(len(per_host)), prime_factors(per_host[0])
    orders = [
        [*outer, *inner]
        for outer in itertools.permutations(across)
        for inner in itertools.permutations(inside)
    ]
    most = max(len(degrees_of(config, order[::-1])) for order in orders)
    shape = list(next(iter(chain.values())).mesh.devices.shape)
    assert len(chain) == most and shape in orders
    # What ascending axes give as many layouts of is as it has ever been.
    if len(degrees_of(config, [*across, *inside][::-1])) == most:
        assert shape == [*across, *inside]


@pytest.mark.parametrize("num_devices", [1, 2, 4, 6, 8])
def test_layouts_built_twice_have_the_same_mesh(num_devices):
    """However the devices are listed: every process has to have one order."""
    devices, config = jax.devices()[:num_devices], heads(20, 4)
    meshes = {
        layout.mesh
        for given_devices in (devices, devices[::-1])
        for layout in layout_chain(factored_mesh(given_devices), config)[0].values()
    }
    assert len(meshes) == 1
    assert math.prod(next(iter(meshes)).devices.shape) == num_devices


@pytest.mark.parametrize(
    "num_devices, config, name, reason",
    [
        (6, heads(56, 8, mlp_dim=64), "dp2tp3", "dp2tp3 needs num_heads / num_kv_heads = 7 divisible by 3"),
        (6, heads(48, 8, mlp_dim=64), "dp2tp3", "dp2tp3 needs mlp_dim = 64 divisible by 3"),
        (6, heads(24, 24), "dp3tp2", "tp takes whole axes of the devices, of 3, 2 in this order, .* 1, 3, 6;"),
        (6, heads(24, 24), "dp2tp4", "dp and tp whose product is the number of devices, 6; with this model 6"),
        (8, heads(24, 8), "dp2tp4x", "whose product is the number of devices, 8; .* dp2tp4, dp1tp8; "),
        (8, heads(12, 4, vocab_multiple=2, vocab_size=62), "dp2tp4", "padded vocab_size = 62 divisible by 4"),
    ],
)  # fmt: skip
def test_a_refused_layout_says_what_does_not_divide(num_devices, config, name, reason):
    mesh = factored_mesh(jax.devices()[:num_devices])
    chain, _ = layout_chain(mesh, config)
    with pytest.raises(UserError, match=f"option --layout is '{name}': .*{reason}.*choose one"):
        find_layout(chain, name, mesh, config)


def test_a_layout_of_another_order_is_found_where_it_has_more():
    mesh, config = factored_mesh(jax.devices()[:6]), heads(20, 4)
    chain, _ = layout_chain(mesh, config)
    assert find_layout(chain, "dp3tp2", mesh, config) is chain[Split(3, 2)]


SIX = (Split(6, 1), Split(2, 3), Split(1, 6))


@pytest.mark.parametrize(
    "smallest, largest, steps",
    [(4, 16, (4, 8, 16)), (4, 20, (4, 8, 16, 20)), (5, 5, (5,)), (3, 5, (3, 5))],
)
def test_a_ladder_doubles_up_to_its_top(smallest, largest, steps):
    assert ladder(smallest, largest) == steps


buckets = st.builds(
    lambda splits, capacity, rows, length, longest: (
        capacity,
        longest,
        Buckets.of(splits, capacity, BucketLimits(rows, length, longest)),
    ),
    st.sampled_from([*permutations(SPLITS, 3), SPLITS, SIX, (Split(1, 1),)]),
    st.integers(1, 100),
    st.integers(1, 20),
    st.integers(1, 50),
    st.integers(1, 300),
)


@given(buckets)
def test_every_load_has_a_bucket(built):
    capacity, longest, buckets = built
    assert buckets.length_for(longest) >= longest
    for split, rows in buckets.rows.items():
        assert list(rows) == sorted(set(rows))
        for running in (0, 1, capacity):
            per_replica = -(-running // split.dp)
            chosen = buckets.rows_for(split, per_replica)
            assert chosen >= max(per_replica, 1)
            assert buckets.rows_below(split, chosen) < max(per_replica, 1)


@given(buckets)
def test_every_bucket_has_a_bucket_to_switch_to(built):
    """Going up from each; going down from the one that a narrower layout's bucket came from."""
    _, _, buckets = built
    for narrow, wide in product(buckets.rows, repeat=2):
        if wide.tp > narrow.tp:
            ratio = narrow.dp // wide.dp
            assert {n * ratio for n in buckets.rows[narrow]} <= set(buckets.rows[wide])


BASE = replace(
    MODELS["kv2"],
    num_layers=1,
    embed_dim=24,
    mlp_dim=48,
    num_heads=9,
    num_kv_heads=3,
    head_dim=4,
    vocab_multiple=8,
)


def heads_of(num_heads: int, num_kv_heads: int, **more) -> ModelConfig:
    return replace(BASE, num_heads=num_heads, num_kv_heads=num_kv_heads, **more)


@given(
    st.sampled_from([1, 2, 3, 4, 8]),
    st.integers(1, 9),
    st.sampled_from([(2,), (3,), (4,), (6,), (8,), (12,), (4, 4)]),
    st.sampled_from([48, 20]),
)
def test_no_more_is_padded_than_opens_layouts(kv_heads, queries, per_host, mlp_dim):
    plain = heads_of(kv_heads * queries, kv_heads, mlp_dim=mlp_dim)
    devices = fake_devices(*per_host)
    config = padded_for(devices, plain)
    mesh, vocab = factored_mesh(devices), config.vocab_multiple
    count = len(layout_chain(mesh, config)[0])
    for multiple in range(1, 13):
        other = replace(plain, query_multiple=multiple, vocab_multiple=vocab)
        if other.padded_queries_per_kv <= queries * (1 + MOST_PADDING):
            opened = len(layout_chain(mesh, other)[0])
            assert opened <= count
            if opened == count:
                assert config.padded_queries_per_kv <= other.padded_queries_per_kv


@pytest.mark.parametrize(
    "name, devices, degrees, num_heads",
    [("qwen2.5-7b", 8, [1, 2, 4, 8], 32), ("qwen3-8b", 8, [1, 2, 4, 8], 32)],
)
def test_published_models_have_their_widest_layouts(name, devices, degrees, num_heads):
    config = padded_for(fake_devices(devices), preset(name))
    chain, _ = layout_chain(factored_mesh(fake_devices(devices)), config)
    assert [split.tp for split in chain] == degrees
    assert config.padded_num_heads == num_heads


def test_a_pinned_layout_that_needs_no_padding_has_none():
    devices, plain = fake_devices(8), heads_of(28, 4)
    assert padded_for(devices, plain, [4]).padded_num_heads == 28
    assert padded_for(devices, plain, [8]).padded_num_heads == 32
    assert padded_for(devices, heads_of(32, 4)).query_multiple == 1


PLAIN = Policy.from_config(BASE)
PADDED = Policy.from_config(replace(BASE, query_multiple=4))


def test_random_weights_are_those_of_the_unpadded_model_and_zeros():
    for plain, padded in zip(
        jax.tree.leaves(pad(jax.device_get(PLAIN.init(3)), PADDED)),
        jax.tree.leaves(PADDED.init(3)),
        strict=True,
    ):
        np.testing.assert_array_equal(padded, plain)


def updated(policy: Policy, params: Params):
    """Parameters, moments and the norm of the gradient after two decayed steps."""
    tokens = jnp.asarray(np.random.default_rng(1).integers(0, 61, (4, 9), np.int32))
    positions = jnp.tile(jnp.arange(9), (4, 1))
    optimizer = make_optimizer(
        learning_rate=1e-2, total_steps=9, weight_decay=0.1, max_grad_norm=0.5
    )

    def loss(params):
        model = policy.bind(params)
        hidden = model(tokens, positions).hidden
        return -jnp.mean(jax.nn.log_softmax(model.logits(hidden)[..., :61])[:, :, 5])

    @jax.jit
    def step(params, state):
        grads = jax.grad(loss)(params)
        updates, state = optimizer.update(grads, state, params)
        norm = jnp.sqrt(sum(jnp.sum(x**2) for x in jax.tree.leaves(grads)))
        return jax.tree.map(jnp.add, params, updates), state, norm

    params = jax.device_put(params)
    state = optimizer.init(params)
    for _ in range(2):
        params, state, norm = step(params, state)
    return params, norm


def test_an_update_leaves_padding_zero_and_is_the_unpadded_ones():
    params = jax.device_get(lively_params(PLAIN))
    plain, norm = updated(PLAIN, params)
    padded, padded_norm = updated(PADDED, pad(params, PADDED))
    np.testing.assert_allclose(padded_norm, norm, rtol=1e-5)
    for one, other in zip(
        jax.tree.leaves(pad(jax.device_get(plain), PADDED)), jax.tree.leaves(padded), strict=True
    ):
        np.testing.assert_allclose(other, one, atol=1e-5)
        assert not np.asarray(other)[one == 0].any()


def test_an_export_has_no_padding_and_loads_with_another(tmp_path: Path):
    params = pad(jax.device_get(lively_params(PLAIN)), PADDED)
    export(tmp_path / "padded", PADDED, jax.device_put(params), jnp.float32)
    plain = load_params(tmp_path / "padded", PLAIN, None, jnp.float32)
    again = load_params(tmp_path / "padded", PADDED, None, jnp.float32)
    for a, b, c in zip(*map(jax.tree.leaves, (pad(plain, PADDED), params, again)), strict=True):
        for x in (b, c):  # no other dimension is as long as the vocabulary
            np.testing.assert_array_equal(a[: BASE.vocab_size], x[: BASE.vocab_size])


def test_a_base_is_known_whatever_pads_it():
    params = jax.device_get(PLAIN.init(0))
    odd = Policy.from_config(replace(BASE, vocab_multiple=24, query_multiple=2))
    sums = {int(base_checksum(p, pad(params, p))) for p in (PLAIN, PADDED, odd)}
    assert len(sums) == 1
    changed = jax.tree.map(lambda x: x * 1.01, params)
    assert int(base_checksum(PADDED, pad(changed, PADDED))) not in sums


def test_adapters_are_those_of_the_unpadded_model(tmp_path: Path):
    plain, padded = (
        Lora.of(policy, rank=2, alpha=4, targets=["all-linear"]) for policy in (PLAIN, PADDED)
    )
    assert plain.num_weights == padded.num_weights
    ours, theirs = jax.device_get((plain.init(1), padded.init(1)))
    for name, adapter in ours.items():
        for x, y in ((adapter.a, theirs[name].a), (adapter.b, theirs[name].b)):
            behind = [(0, n - m) for n, m in zip(y.shape, x.shape, strict=True)]
            np.testing.assert_array_equal(np.pad(x, behind), y)
    export_adapter(tmp_path / "adapter", padded, theirs, "base")
    found = load_adapter(tmp_path / "adapter", read_adapter(tmp_path / "adapter", PLAIN))
    again = load_adapter(tmp_path / "adapter", read_adapter(tmp_path / "adapter", PADDED))
    for a, b in ((found, ours), (again, theirs)):
        for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
            np.testing.assert_array_equal(x, y)


# --- the lossless contract with padded heads_of, and where axes come in another order ----------------


def of_heads(num_heads: int, kv_heads: int, **more: int) -> ModelConfig:
    return replace(MODELS["kv2"], num_heads=num_heads, num_kv_heads=kv_heads, **more)


def check(config: ModelConfig, settings: Settings, num_devices: int, path: Sequence[int]) -> None:
    """Of an adaptive run and of every layout, all held against the unpadded model."""
    config = padded_for(jax.devices()[:num_devices], config)
    one = Subject(config, settings, num_devices=num_devices)
    requests = make_requests(settings, seed=0)
    static, _ = one.run(requests, one.static(1))
    adaptive, report = one.run(requests, one.adaptive(path, "migrate", len(requests)))
    assert len(report.switches) == len(path) - 1
    others = [one.run(requests, one.static(split.tp))[0] for split in one.engine.layouts]
    check_lossless(one.compared(requests, static, adaptive, *others))


@pytest.mark.slow  # each compiles an engine of its own
@pytest.mark.parametrize(
    "num_heads, kv_heads, mlp_dim, num_devices, path",
    [
        (9, 3, 48, 6, (1, 3, 6, 1)),
        (28, 4, 64, 8, (1, 8, 4)),
        (20, 4, 64, 6, (1, 2, 1)),  # three devices of a replica would divide nothing
    ],
)
def test_switching_changes_no_token(num_heads, kv_heads, mlp_dim, num_devices, path):
    settings = Settings(sequences=num_devices * 2, min_rows=4, min_length=64)
    check(of_heads(num_heads, kv_heads, mlp_dim=mlp_dim), settings, num_devices, path)


def test_adapters_beside_padded_weights_are_exact_at_a_switch():
    settings = Settings(sequences=4, min_rows=4, min_length=64, lora_rank=2)
    check(of_heads(9, 3, num_layers=1), settings, 2, (1, 2))
