"""What each policy of rematerialization keeps and computes anew: residuals and jaxprs, by hand."""

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any, get_args, get_type_hints

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.extend.core import jaxprs_in_params

from pat_jax.config.run import RunConfig
from pat_jax.config.sft import SftConfig
from pat_jax.models.kernels.kernel_choice import Kernels
from pat_jax.models.layer_loop import scanned, unrolled
from pat_jax.models.layers import Rotation
from pat_jax.models.lora import Lora
from pat_jax.models.parameters import Keys
from pat_jax.models.partition import Partition
from pat_jax.models.policy import Params, Policy
from pat_jax.models.presets import preset
from pat_jax.models.rematerialization import NONE, POLICIES
from pat_jax.models.transformer import Layer, _run_layer

LENGTH, EMBED, MLP, KV, GROUP, DIM = 256, 96, 160, 2, 3, 16
MODEL = replace(
    preset("llama-3.1-8b"),
    embed_dim=EMBED,
    mlp_dim=MLP,
    num_heads=KV * GROUP,
    num_kv_heads=KV,
    head_dim=DIM,
)
HEADS = KV * GROUP * DIM  # numbers of a token's queries, of what attention makes of them
Shapes = Counter[tuple[tuple[int, ...], str]]


@dataclass(frozen=True)
class On(Partition):
    """On one device of a platform, traced and never lowered."""

    name: str = "cpu"

    @property
    def kernels(self) -> Kernels:
        return Kernels.of(self.name)


def layer(remat: str, platform: str = "cpu") -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """A layer as a function of its parameters and input, and the shapes of those, in bfloat16."""
    made = nnx.eval_shape(lambda: Layer(MODEL, 0, keys=Keys(jax.random.key(0))))
    definition, params = nnx.split(made)
    positions = jnp.arange(LENGTH)[None]
    rotation = Rotation(*jnp.ones((2, 1, LENGTH, DIM // 2)))

    def run(params: Any, x: Any) -> Any:
        of_all, how = (positions, rotation), {"partition": On(platform), "remat": remat}
        return _run_layer(definition, params, x, *of_all, None, positions >= 0, None, **how)[0]

    return run, (params, jax.ShapeDtypeStruct((1, LENGTH, EMBED), jnp.bfloat16))


def shapes(tree: Any) -> Shapes:
    """Of floats: positions are kept by all."""
    leaves = jax.tree.leaves(tree)
    return Counter((x.shape, str(x.dtype)) for x in leaves if jnp.issubdtype(x.dtype, jnp.floating))


def kept(remat: str, platform: str = "cpu") -> Shapes:
    """What the backward pass reads beside parameters, input and rotation."""
    run, args = layer(remat, platform)
    residuals = jax.eval_shape(lambda *args: jax.vjp(run, *args)[1], *args)
    rotation = Counter({((1, LENGTH, DIM // 2), "float32"): 2})
    return shapes(residuals) - shapes(args) - rotation


def num_bytes(kept: Shapes) -> int:
    return sum(n * int(jnp.dtype(d).itemsize) * jnp.zeros(s).size for (s, d), n in kept.items())


OUT = ((1, LENGTH, KV, GROUP, DIM), "bfloat16")
SUMS = ((1, KV, GROUP, LENGTH), "float32")
QUERIES = OUT
CONTEXT = ((1, LENGTH, KV, DIM), "bfloat16")
INTO_RESIDUAL = ((1, LENGTH, EMBED), "bfloat16")
WIDE = ((1, LENGTH, MLP), "bfloat16")


def test_each_policy_keeps_what_it_says():
    assert kept("full") == Counter()
    assert kept("attention") == Counter([OUT, SUMS])
    # Of the seven products all but the last: nothing of a layer's backward pass reads what it returns.
    products = Counter([QUERIES, CONTEXT, CONTEXT, INTO_RESIDUAL, WIDE, WIDE])
    assert kept("dots") == Counter([OUT, SUMS]) + products
    assert num_bytes(kept("none")) > 2 * num_bytes(kept("dots"))


@pytest.mark.parametrize("platform", ["gpu", "tpu"])
def test_kernels_of_every_platform_keep_as_much(platform: str):
    """In an order of their own; splash attention fills heads up to 128."""
    wide = 128 if platform == "tpu" else DIM
    attention = LENGTH * KV * GROUP * (2 * wide + 4)
    assert num_bytes(kept("full", platform)) == 0
    assert num_bytes(kept("attention", platform)) == attention
    more = num_bytes(kept("dots")) - num_bytes(kept("attention"))
    assert num_bytes(kept("dots", platform)) == attention + more


@pytest.mark.parametrize("config", [RunConfig, SftConfig])
def test_options_name_these_policies(config: type):
    assert sorted(get_args(get_type_hints(config)["remat"])) == sorted(["auto", *POLICIES, NONE])


LAYERS, LOOPS = 3, 13
QWEN3 = replace(preset("tiny", vocab_size=61), num_layers=LAYERS)
CONFIGS = {"qwen3": QWEN3, "qwen2": replace(QWEN3, qk_norm=False, attention_bias=True)}
TOKENS = jnp.asarray(np.random.default_rng(0).integers(0, 61, (2, LOOPS)))
# Two sequences in the first row.
POSITIONS = jnp.stack([jnp.arange(LOOPS) % 7, jnp.arange(LOOPS)])


@cache
def policy(name: str) -> Policy:
    return Policy.from_config(CONFIGS[name])


@cache
def weights(name: str) -> Params:
    """So large that every part of every layer moves the output."""
    rng = np.random.default_rng(1)
    return jax.tree.map(
        lambda x: rng.normal(x.ndim == 1, 0.3, x.shape).astype(np.float32),
        policy(name).abstract_params,
    )


def hidden(name: str, params: Params, **how: Any) -> jax.Array:
    return policy(name).bind(params)(TOKENS, POSITIONS, **how)[0]


@cache
def loss_and_gradients(name: str, **how: Any) -> tuple[np.ndarray, Params]:
    def loss(params: Params) -> jax.Array:
        out = hidden(name, params, **how).astype(jnp.float32)
        return jnp.sum(jnp.sin(out) * jnp.arange(LOOPS)[None, :, None])

    return jax.device_get(jax.jit(jax.value_and_grad(loss))(weights(name)))


@pytest.mark.parametrize(
    ("name", "remat", "scan_layers"),
    [
        pytest.param("qwen2", NONE, True, marks=pytest.mark.slow),
        ("qwen3", NONE, True),
        ("qwen3", "full", True),
        *(pytest.param("qwen3", x, True, marks=pytest.mark.slow) for x in POLICIES if x != "full"),
        *(pytest.param("qwen3", remat, False, marks=pytest.mark.slow) for remat in POLICIES),
    ],
)
def test_neither_a_loop_nor_rematerialization_changes_loss_or_gradients(name, remat, scan_layers):
    wanted, wanted_grads = loss_and_gradients(name, remat=NONE, scan_layers=False)
    loss, grads = loss_and_gradients(name, remat=remat, scan_layers=scan_layers)
    np.testing.assert_allclose(loss, wanted, rtol=1e-6)
    for expected, got in zip(jax.tree.leaves(wanted_grads), jax.tree.leaves(grads), strict=True):
        assert np.abs(expected).max() > 0
        np.testing.assert_allclose(got, expected, atol=1e-5 * np.abs(expected).max())


def test_a_loop_reads_parameters_in_the_dtype_of_the_layers():
    """Half of the copy's memory, and of what is gathered in each of its turns."""
    run = partial(hidden, "qwen2", dtype=jnp.bfloat16, scan_layers=True)
    (loop,) = (
        each for each in equations(run, weights("qwen2")) if each.params.get("length") == LAYERS
    )
    taken = [x for x in loop.invars if x.aval.shape[:1] == (LAYERS,)]
    assert len(taken) == len(jax.tree.leaves(weights("qwen2")["layers"][0]))
    assert {str(x.aval.dtype) for x in taken} == {"bfloat16"}


def equations(function: Any, *args: Any) -> Iterator[Any]:
    """Of what a function is, those inside of loops left out."""

    def inside(jaxpr: Any) -> Iterator[Any]:
        for equation in jaxpr.eqns:
            yield equation
            if equation.primitive.name != "scan":
                for inner in jaxprs_in_params(equation.params):
                    yield from inside(inner)

    return inside(jax.make_jaxpr(function)(*args).jaxpr)


def loops(function: Any, *args: Any) -> Counter[int]:
    """Loops by their lengths."""
    found = equations(function, *args)
    return Counter(each.params["length"] for each in found if each.primitive.name == "scan")


@pytest.mark.parametrize("scan_layers", [True, False])
def test_all_layers_are_one_loop_where_that_is_asked_for(scan_layers: bool):
    found = loops(partial(hidden, "qwen3", scan_layers=scan_layers), weights("qwen3"))
    assert found[LAYERS] == scan_layers


def kept_by_loops(remat: str, *, scan_layers: bool) -> int:
    """Numbers of floats that the backward pass reads beside the parameters."""

    def run(params: Params) -> jax.Array:
        return hidden("qwen3", params, remat=remat, scan_layers=scan_layers, dtype=jnp.bfloat16)

    residuals = jax.eval_shape(lambda params: jax.vjp(run, params)[1], weights("qwen3"))
    floats = [x for x in jax.tree.leaves(residuals) if jnp.issubdtype(x.dtype, jnp.floating)]
    return sum(x.size for x in floats if TOKENS.size in (x.size, *_products(x.shape)))


def _products(shape: tuple[int, ...]) -> set[int]:
    """Of neighbouring dimensions: an activation has one of each token."""
    return {
        int(np.prod(shape[i:j])) for i in range(len(shape)) for j in range(i + 1, len(shape) + 1)
    }


@pytest.mark.parametrize("remat", [NONE, *POLICIES])
def test_a_loop_keeps_what_layers_one_by_one_keep(remat: str):
    """Where all is kept, some that layers have alike once instead of in each."""
    one_by_one, loop = (kept_by_loops(remat, scan_layers=scan) for scan in (False, True))
    assert 0.98 * one_by_one < loop <= one_by_one if remat == NONE else loop == one_by_one > 0


def test_neighbours_that_are_alike_are_one_loop_and_others_run_alone():
    """Layers of three forms: their order stays, and no two loops are where one would do."""
    rng = np.random.default_rng(0)

    def layers(number: int, *biased: int) -> list[dict[str, np.ndarray]]:
        shapes = {"a": (2, 2)} | ({"b": biased} if biased else {})
        return [{k: rng.normal(size=shape) for k, shape in shapes.items()} for _ in range(number)]

    every = [*layers(3, 2), *layers(1), *layers(3, 2), *layers(2, 1), *layers(2)]

    def run(params: dict[str, jax.Array], x: jax.Array) -> tuple[jax.Array, jax.Array]:
        return jnp.tanh(params["a"] @ x + params.get("b", 0.5)), x

    x = jnp.array([0.1, -0.2])
    looped, plain = scanned(run, every, x), unrolled(run, every, x)
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-5), looped, plain)
    assert len(looped[1]) == len(every)
    assert loops(lambda x: scanned(run, every, x), x) == Counter({3: 2, 2: 2})


def test_adapters_of_some_layers_run_in_loops():
    base = policy("qwen3")
    lora = Lora.of(base, rank=2, alpha=4, targets=["layers.2.self_attn.o_proj", "gate_proj"])
    adapters = jax.tree.map(lambda x: jnp.full(x.shape, 0.1), lora.abstract_params)

    def loss(adapters: Any, scan_layers: bool) -> jax.Array:
        params = lora.attach(weights("qwen3"), adapters)
        return jnp.sum(jnp.sin(hidden("qwen3", params, scan_layers=scan_layers)))

    run = jax.jit(jax.value_and_grad(loss), static_argnums=1)
    (wanted, wanted_grads), (got, grads) = run(adapters, False), run(adapters, True)
    np.testing.assert_allclose(got, wanted, rtol=1e-5)
    for a, b in zip(jax.tree.leaves(wanted_grads), jax.tree.leaves(grads), strict=True):
        np.testing.assert_allclose(b, a, atol=1e-5 * np.abs(a).max())
    assert loops(lambda x: loss(x, True), adapters)[LAYERS - 1] == 1
