"""What each policy of rematerialization keeps and computes anew: residuals and jaxprs, by hand."""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, get_args, get_type_hints

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from pat_jax.config.run import RunConfig
from pat_jax.config.sft import SftConfig
from pat_jax.models.kernels.kernel_choice import Kernels
from pat_jax.models.layers import Rotation
from pat_jax.models.parameters import Keys
from pat_jax.models.partition import Partition
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
    assert sorted(get_args(get_type_hints(config)["remat"])) == sorted([*POLICIES, NONE])
