"""A layer of experts against its equation in NumPy; tiles of rows, and which weights are read."""

import re
from dataclasses import replace
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pat_jax.layout.partitions import in_chunks
from pat_jax.models.adapted_weight import AdaptedWeight
from pat_jax.models.config import ExpertsConfig, ModelConfig
from pat_jax.models.experts import NO_TOKEN, NOT_RECORDED, Experts, Routed, _compute
from pat_jax.models.kernels.grouped import in_tiles, tile_size
from pat_jax.models.parameters import Keys
from pat_jax.models.partition import Partition, Rows
from pat_jax.models.policy import Params, Policy
from pat_jax.models.rematerialization import POLICIES, rematerialized
from tests.lossless import EXPERTS, lively_params

EMBED = 12
ROWS, LENGTH = 4, 16  # 64 tokens: with two of eight experts each, tiles of 16
Weights = dict[str, np.ndarray]


def config_of(experts: ExpertsConfig) -> ModelConfig:
    return replace(EXPERTS["moe"], embed_dim=EMBED, experts=experts)


def weights_of(experts: ExpertsConfig, seed: int = 0) -> Weights:
    rng, num, dim = np.random.default_rng(seed), experts.num_experts, experts.expert_dim
    shapes = {
        "router": (num, EMBED),
        "gate": (num, dim, EMBED),
        "up": (num, dim, EMBED),
        "down": (num, EMBED, dim),
    }
    return {name: rng.normal(0, 0.4, shape).astype(np.float32) for name, shape in shapes.items()}


def tokens_of(seed: int = 1) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=(ROWS, LENGTH, EMBED)).astype(np.float32)


def layer(experts: ExpertsConfig, weights: Any) -> Experts:
    made = Experts(config_of(experts), keys=Keys(jax.random.key(0)))
    for name, value in weights.items():
        getattr(made, name).set_value(value)
    return made


@partial(jax.jit, static_argnums=0)
def computed(
    experts: ExpertsConfig, weights: Any, x: Any, is_real: Any, recorded: Any
) -> tuple[jax.Array, Routed]:
    return layer(experts, weights)(x, is_real, recorded, Partition())


def likeliest(logits: np.ndarray, k: int) -> np.ndarray:
    return np.argsort(-logits, axis=-1, kind="stable")[..., :k]


def mixed(experts: ExpertsConfig, weights: Weights, x: np.ndarray, chosen: np.ndarray) -> Any:
    """Σ pᵢ(x) · Eᵢ(x) token by token, in float64, and the routers' logits."""
    router, gate, up, down = (np.asarray(w, np.float64) for w in weights.values())
    x = np.asarray(x, np.float64)
    logits = x @ router.T
    y = np.zeros_like(x)
    for at in np.ndindex(*x.shape[:-1]):
        numerators = np.exp(logits[at] - logits[at].max())
        of_all = numerators[chosen[at]] if experts.norm_topk_prob else numerators
        for i in chosen[at]:
            a, b = gate[i] @ x[at], up[i] @ x[at]
            y[at] += numerators[i] / of_all.sum() * (down[i] @ (a / (1 + np.exp(-a)) * b))
    return y, logits


def assert_close(got: Any, wanted: np.ndarray, bound: float = 1e-5) -> None:
    """By the largest of what is wanted."""
    assert np.abs(wanted).max() > 0
    np.testing.assert_allclose(got, wanted, rtol=0, atol=bound * np.abs(wanted).max())


EIGHT = ExpertsConfig(8, 2, 16)
EVERY_TOKEN = np.ones((ROWS, LENGTH), bool)


@pytest.mark.parametrize("norm_topk_prob", [True, False])
@pytest.mark.parametrize(("num", "k"), [(8, 2), (5, 3), (16, 1), (3, 3)])
def test_a_token_is_computed_by_its_likeliest_experts(num: int, k: int, norm_topk_prob: bool):
    experts = ExpertsConfig(num, k, 16, norm_topk_prob)
    weights, x = weights_of(experts), tokens_of()
    y, routed = computed(experts, weights, x, EVERY_TOKEN, None)
    chosen = likeliest(x @ weights["router"].T, k)
    wanted, logits = mixed(experts, weights, x, chosen)
    assert_close(y, wanted)
    np.testing.assert_array_equal(routed.experts, chosen)
    shares = np.exp(logits) / np.exp(logits).sum(axis=-1, keepdims=True)
    np.testing.assert_allclose(routed.probability, shares.sum(axis=(0, 1)), rtol=1e-5)
    np.testing.assert_array_equal(routed.load, np.bincount(chosen.reshape(-1), minlength=num))
    np.testing.assert_allclose(routed.entropy, -np.sum(shares * np.log(shares)), rtol=1e-5)
    descending = -np.sort(-logits, axis=-1)
    margin = descending[..., k - 1] - descending[..., k] if k < num else np.inf
    np.testing.assert_allclose(routed.margin, np.broadcast_to(margin, (ROWS, LENGTH)), atol=1e-5)


@pytest.mark.parametrize("norm_topk_prob", [True, False])
def test_recorded_experts_are_taken_with_weights_of_the_router_at_hand(norm_topk_prob: bool):
    experts = replace(EIGHT, norm_topk_prob=norm_topk_prob)
    weights, x, rng = weights_of(experts), tokens_of(), np.random.default_rng(2)
    recorded = np.argsort(rng.random((ROWS, LENGTH, 8)))[..., :2].astype(np.int16)
    recorded[1] = NOT_RECORDED
    y, routed = computed(experts, weights, x, EVERY_TOKEN, recorded)
    own = likeliest(x @ weights["router"].T, 2)
    chosen = np.where(recorded < 0, own, recorded)
    wanted, logits = mixed(experts, weights, x, chosen)
    assert_close(y, wanted)
    np.testing.assert_array_equal(routed.experts, own)
    is_chosen = (chosen[..., None] == np.arange(8)).any(axis=-2)
    least = np.where(is_chosen, logits, np.inf).min(axis=-1)
    best = np.where(is_chosen, -np.inf, logits).max(axis=-1)
    np.testing.assert_allclose(routed.margin, least - best, atol=1e-5)
    others = (np.sort(own) != np.sort(recorded)).any(axis=-1) & (recorded[..., 0] >= 0)
    assert others.sum() > 30
    assert np.all(np.asarray(routed.margin)[others] < 0)
    assert np.all(np.asarray(routed.margin)[1] > 0)


def test_of_equal_logits_the_lower_number_is_chosen():
    weights = weights_of(EIGHT)
    weights["router"][:] = weights["router"][0]
    _, routed = computed(EIGHT, weights, tokens_of(), EVERY_TOKEN, None)
    assert np.unique(np.asarray(routed.experts).reshape(-1, 2), axis=0).tolist() == [[0, 1]]
    np.testing.assert_array_equal(routed.margin, 0)


@given(st.integers(1, 600), st.integers(1, 8), st.integers(8, 128))
def test_a_tile_is_about_as_large_as_an_experts_rows(rows: int, k: int, num_experts: int):
    size, mean = tile_size(rows, k, num_experts), rows * k / num_experts
    assert size & (size - 1) == 0 and size <= 128
    assert size < 2 * max(1, mean) and (size == 128 or size >= int(mean))


def without(weights: Weights, experts: Any) -> Weights:
    """With NaN in the place of these experts' weights."""
    changed = {name: w.copy() for name, w in weights.items()}
    for name in ("gate", "up", "down"):
        changed[name][list(experts)] = np.nan
    return changed


@pytest.mark.parametrize("live", [(0, 0), (2, 7)])
def test_one_live_row_of_64_reads_its_own_experts_alone(live: tuple[int, int]):
    weights, x, is_real = weights_of(EIGHT), tokens_of(), np.zeros((ROWS, LENGTH), bool)
    is_real[live] = True
    own = likeliest(x @ weights["router"].T, 2)[live]
    others = set(range(8)) - set(own.tolist())
    y, routed = computed(EIGHT, without(weights, others), x, is_real, None)
    wanted, _ = mixed(EIGHT, weights, x[live][None], own[None])
    assert_close(y[live], wanted[0])
    assert not np.asarray(y)[~is_real].any()
    np.testing.assert_allclose(np.sum(routed.probability), 1, rtol=1e-5)
    assert set(np.flatnonzero(routed.load)) == set(own.tolist())
    # That the weights are read in this way is seen when one of its own is missing.
    y, _ = computed(EIGHT, without(weights, own[:1]), x, is_real, None)
    assert np.isnan(y[live]).all()
    chosen = np.where(is_real[..., None], own, NO_TOKEN).reshape(-1, 2)
    assert in_tiles(jnp.asarray(chosen), 8, 16).count == 2


def test_where_no_row_is_live_no_expert_is_read():
    weights = without(weights_of(EIGHT), range(8))
    y, routed = computed(EIGHT, weights, tokens_of(), ~EVERY_TOKEN, None)
    assert not any(
        np.asarray(x).any() for x in (y, routed.load, routed.probability, routed.entropy)
    )


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_a_token_copies_the_weights_of_its_own_experts_alone(dtype: Any):
    """Nor are those of the others converted, in a step of a burst or before it."""
    shapes = (32, 64, 32), (32, 64, 32), (32, 32, 64)
    experts = tuple(jax.ShapeDtypeStruct(shape, dtype) for shape in shapes)
    rows = (
        jax.ShapeDtypeStruct((1, 1, 32), dtype),
        jax.ShapeDtypeStruct((1, 1, 2), jnp.int16),
        jax.ShapeDtypeStruct((1, 1, 2), dtype),
    )

    def burst(rows: Any, experts: Any) -> jax.Array:
        x, *routes = rows
        step = partial(_compute, num_experts=32)
        return jax.lax.fori_loop(0, 4, lambda _, x: step(Rows(x, *routes), experts, 0), x)

    memory: Any = jax.jit(burst).lower(rows, experts).compile().memory_analysis()
    one_in_float32 = 3 * 4 * 64 * 32
    assert memory.temp_size_in_bytes < 2 * one_in_float32


def dense(experts: ExpertsConfig, weights: Any, x: Any, chosen: Any) -> tuple[jax.Array, jax.Array]:
    """All experts of every token, those that are not chosen times 0."""
    logits = jnp.einsum("rle,ne->rln", x, weights["router"])
    probabilities = jax.nn.softmax(logits, axis=-1)
    is_chosen = jax.nn.one_hot(chosen, logits.shape[-1], dtype=bool).any(axis=-2)
    shares = jnp.where(is_chosen, probabilities, 0)
    if experts.norm_topk_prob:
        shares = shares / shares.sum(axis=-1, keepdims=True)
    gated = jax.nn.silu(jnp.einsum("rle,nde->rlnd", x, weights["gate"]))
    gated = gated * jnp.einsum("rle,nde->rlnd", x, weights["up"])
    each = jnp.einsum("rlnd,ned->rlne", gated, weights["down"])
    return jnp.einsum("rln,rlne->rle", shares, each), probabilities.sum(axis=(0, 1))


@pytest.mark.parametrize(
    ("is_crowded", "norm_topk_prob"),
    [
        (False, True),
        (True, False),
        pytest.param(False, False, marks=pytest.mark.slow),
        pytest.param(True, True, marks=pytest.mark.slow),
    ],
)
def test_gradients_are_those_of_all_experts_times_their_shares(is_crowded, norm_topk_prob):
    """Of experts, router and input, to those of float64; some rows are not there."""
    experts = replace(EIGHT, norm_topk_prob=norm_topk_prob)
    weights, x, rng = weights_of(experts), tokens_of(), np.random.default_rng(3)
    chosen = likeliest(x @ weights["router"].T, 2).astype(np.int16)
    if is_crowded:  # 64 rows of one expert, in tiles of 16
        chosen = np.stack([np.full((ROWS, LENGTH), 6), chosen[..., 0] % 6], -1).astype(np.int16)
    is_real, toward = rng.random((ROWS, LENGTH)) < 0.9, rng.normal(size=x.shape)
    of_shares = rng.normal(size=8)
    x = np.where(is_real[..., None], x, 0)  # as absent tokens come out of an embedding

    def got(weights: Any, x: Any) -> Any:
        y, routed = computed(experts, weights, x, is_real, chosen)
        return jnp.sum(y * toward) + jnp.sum(routed.probability * of_shares)

    grads = jax.jit(jax.grad(got, argnums=(0, 1)))(weights, x)
    with jax.enable_x64(True):

        def wanted(weights: Any, x: Any) -> Any:
            y, _ = dense(experts, weights, x, jnp.asarray(chosen))
            shares = jax.nn.softmax(jnp.einsum("rle,ne->rln", x, weights["router"]), axis=-1)
            shares = jnp.where(is_real[..., None], shares, 0).sum(axis=(0, 1))
            return jnp.sum(y * toward * is_real[..., None]) + jnp.sum(shares * of_shares)

        exact = jax.tree.map(lambda w: jnp.asarray(w, jnp.float64), (weights, x))
        expected = jax.tree.map(np.asarray, jax.grad(wanted, argnums=(0, 1))(*exact))
    for one, other in zip(jax.tree.leaves(grads), jax.tree.leaves(expected), strict=True):
        assert one.dtype == np.float32 and other.dtype == np.float64
        assert_close(one, other)


def test_experts_under_adapters_have_no_gradients_of_their_own():
    """The compiled program adds up none of the size of their weights, as it does where they are trained."""
    rng, rank = np.random.default_rng(4), 3
    weights, x, chosen = weights_of(EIGHT), tokens_of(), rng.integers(0, 8, (ROWS, LENGTH, 2))
    base = tuple(weights[name] for name in ("gate", "up", "down"))
    shapes = [((8, rank, w.shape[2]), (8, w.shape[1], rank)) for w in base]
    low = [tuple(rng.normal(size=s).astype(np.float32) for s in pair) for pair in shapes]

    def loss(base: Any, low: Any) -> Any:
        experts = tuple(AdaptedWeight(w, *pair) for w, pair in zip(base, low, strict=True))
        rows = Rows(jnp.asarray(x), jnp.asarray(chosen), jnp.full(chosen.shape, 0.5))
        return jnp.sum(_compute(rows, experts, 0, num_experts=8) ** 2)

    def sums(of: tuple[int, ...]) -> int:
        text = jax.jit(jax.grad(loss, argnums=of)).lower(base, low).compile().as_text()
        assert text is not None
        stacks = r"f32\[8,(16,12|12,16)\]\S* dynamic-update-slice"
        return len(re.findall(stacks, text))

    assert sums((0, 1)) > 0
    assert sums((1,)) == 0


@pytest.mark.parametrize("remat", POLICIES)
def test_a_backward_pass_does_not_choose_again(remat: str):
    """Numbers a bit apart could choose others: the choice is kept by every policy."""
    weights, x, is_real = weights_of(EIGHT), tokens_of(), jnp.asarray(EVERY_TOKEN)

    def run(weights: Any, x: Any) -> jax.Array:
        return layer(EIGHT, weights)(x, is_real, None, Partition())[0]

    def loss(weights: Any, x: Any) -> jax.Array:
        return jnp.sum(rematerialized(run, remat)(weights, x) ** 2)

    text = str(jax.make_jaxpr(jax.grad(loss))(weights, x))
    assert text.count("top_k[") == 1
    residuals = jax.eval_shape(
        lambda *args: jax.vjp(rematerialized(run, remat), *args)[1], weights, x
    )
    kept = [r.shape for r in jax.tree.leaves(residuals) if jnp.issubdtype(r.dtype, jnp.integer)]
    assert kept == [(ROWS, LENGTH, 2)]


@cache
def model(name: str) -> tuple[Policy, Params]:
    policy = Policy.from_config(EXPERTS[name])
    return policy, lively_params(policy)


# The others' experts differ in what the layer's own tests look at.
SOME = [pytest.param(x, marks=[pytest.mark.slow] * (x != "moe")) for x in EXPERTS]


@pytest.mark.parametrize("scan_layers", [False, True])
@pytest.mark.parametrize("name", SOME)
def test_each_layer_has_its_own_of_the_recorded_experts(name: str, scan_layers: bool):
    """Also behind a dense layer, and in a loop over layers."""
    policy, params = model(name)
    layers, k = policy.config.routes_shape
    tokens: Any = np.random.default_rng(0).integers(0, 61, (2, 9))
    positions: Any = np.broadcast_to(np.arange(9), (2, 9))

    @jax.jit
    def run(recorded: Any) -> Any:
        out = policy.bind(params)(tokens, positions, recorded=recorded, scan_layers=scan_layers)
        return out.hidden, out.routed

    hidden, routed = run(np.full((2, 9, layers, k), NOT_RECORDED, np.int16))
    assert routed.experts.shape == (2, 9, layers, k) and routed.experts.dtype == jnp.int16
    assert len(routed.probability) == layers
    np.testing.assert_allclose(routed.probability.sum(axis=-1), 18, rtol=1e-5)
    assert np.all(np.asarray(routed.margin) > 0)
    same, _ = run(routed.experts)
    np.testing.assert_array_equal(same, hidden)
    for changed in range(layers):
        recorded = np.array(routed.experts)
        best = recorded[1, 4, changed, 0]
        recorded[1, 4, changed, 1] = next(i for i in range(4) if i not in recorded[1, 4, changed])
        other, replayed = run(recorded)
        differs = np.zeros((2, 9, layers), bool)
        differs[1, 4, changed] = True
        margin = np.asarray(replayed.margin)
        np.testing.assert_array_equal(margin[..., : changed + 1] < 0, differs[..., : changed + 1])
        assert replayed.experts[1, 4, changed, 0] == best
        moved = np.abs(np.asarray(other - hidden)).max(axis=-1) > 0
        assert moved[1, 4] and not moved[0].any() and not moved[1, :4].any()


@pytest.mark.parametrize(("most", "chunks"), [(60, 1), (59, 2), (16, 4), (7, 12), (3, 12)])
def test_rows_with_many_tokens_are_computed_few_at_a_time(most: int, chunks: int):
    """Of twelve rows of five tokens as many as divide them; a row is never divided."""
    rng, shapes = np.random.default_rng(0), set[tuple[int, ...]]()
    rows = Rows(rng.normal(size=(12, 5, 3)), np.zeros((12, 5, 2)), rng.normal(size=(12, 5, 2)))

    def function(rows: Rows) -> Any:
        shapes.add(rows.x.shape)
        return rows.x * rows.weights.sum(-1)[..., None]

    done = in_chunks(function, rows, most)
    assert shapes == {(12 // chunks, 5, 3)}
    np.testing.assert_allclose(done, function(rows), rtol=1e-5)
