"""Kernels of experts, interpreted, against tiles in plain operations: results, gradients, and which
weights are read. What they are compiled to for machines that are not here."""

import json
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pat_jax.models.adapted_weight import AdaptedWeight
from pat_jax.models.experts import Experts
from pat_jax.models.kernels.expert_mlp import KERNELS, mlp_by_expert, takes_weight
from pat_jax.models.kernels.grouped import tile_size
from pat_jax.models.kernels.grouped_tpu import ChoicesOnTpu
from pat_jax.models.kernels.kernel_choice import ANYWHERE, Kernels
from pat_jax.models.parameters import Keys
from pat_jax.models.partition import Partition
from pat_jax.models.presets import preset
from pat_jax.models.weight_formats import QuantizedWeight, abstract_weight, quantize
from pat_jax.profiling.cross_compile.compile import environment
from pat_jax.profiling.predict.targets import Target

WORKER = Path(__file__).parents[1] / "compiled_experts.py"
ON = {name: Kernels(name).having(["experts"]) for name in ("cpu", "tpu")}
EXPERTS, K = 5, 2
ABSENT = 3  # this expert has no row


class Rows(NamedTuple):
    x: jax.Array
    chosen: jax.Array
    shares: jax.Array
    experts: tuple[Any, Any, Any]
    toward: jax.Array


@pytest.fixture(autouse=True)
def interpreted(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A TPU's kernels run here too."""
    of = partial(ChoicesOnTpu.of, interpret=True)
    monkeypatch.setitem(KERNELS, "tpu", KERNELS["tpu"]._replace(of=of))
    yield


def rows_of(count: int, embed: int, dim: int, *, elsewhere: float = 0.2) -> Rows:
    """Most rows have the first expert; some experts are not here."""
    rng = np.random.default_rng(count)
    chosen = np.where(rng.random((count, K)) < 0.5, [[0, 1]], [[2, 4]])
    unknown = rng.choice([-1, EXPERTS, EXPERTS + 3], chosen.shape)
    chosen = np.where(rng.random(chosen.shape) < elsewhere, unknown, chosen)
    shapes = [(EXPERTS, dim, embed), (EXPERTS, dim, embed), (EXPERTS, embed, dim)]
    x, toward, gate, up, down = (
        jnp.asarray(rng.normal(size=shape), jnp.float32)
        for shape in [(count, embed), (count, embed), *shapes]
    )
    shares = jnp.asarray(rng.uniform(0.2, 1, chosen.shape), jnp.float32)
    return Rows(x, jnp.asarray(chosen), shares, (gate, up, down), toward)


def without(experts: Any, number: int) -> Any:
    """With NaN in the place of an expert's weights."""
    return jax.tree.map(lambda w: w.at[number].set(jnp.nan), experts)


@partial(jax.jit, static_argnums=0)
def results(kernels: Kernels, rows: Rows) -> Any:
    """The sums, and their gradients to rows, shares and experts."""
    size = tile_size(len(rows.x), K, EXPERTS)

    def compute(x: Any, shares: Any, experts: Any) -> jax.Array:
        return mlp_by_expert(experts, x, rows.chosen, shares, size, kernels)

    out, back = jax.vjp(compute, rows.x, rows.shares, rows.experts)
    return out, back(rows.toward)


# Rows, and the width of both sides of an expert: with 3 rows tiles have 16 on a GPU, with 120 they have
# 64; a TPU's tile of 128 has rows of several experts.
SHAPES = [("cpu", 3, 32, 48), ("cpu", 120, 96, 16), ("tpu", 3, 128, 256), ("tpu", 120, 128, 128)]
QUICK = SHAPES[0], SHAPES[3]  # both platforms, few rows and many


@pytest.mark.parametrize(
    ("platform", "count", "embed", "dim"),
    [pytest.param(*x, marks=[] if x in QUICK else pytest.mark.slow) for x in SHAPES],
)
def test_kernels_compute_what_plain_operations_compute(platform, count, embed, dim):
    """Forward and backward, and nothing of the weights of an expert without rows."""
    rows = rows_of(count, embed, dim)
    rows = rows._replace(experts=without(rows.experts, ABSENT))
    wanted = jax.tree.map(np.asarray, results(ANYWHERE, rows))
    got = jax.tree.map(np.asarray, results(ON[platform], rows))
    for one, other in zip(jax.tree.leaves(got), jax.tree.leaves(wanted), strict=True):
        assert np.abs(other).max() > 0
        np.testing.assert_allclose(one, other, rtol=0, atol=1e-5 * np.abs(other).max())
    # That weights are read in this way is seen where one of an expert that has rows is missing.
    rows = rows._replace(experts=without(rows.experts, 0))
    assert np.isnan(results(ON[platform], rows)[0]).any()


@pytest.mark.parametrize("platform", ["cpu", pytest.param("tpu", marks=pytest.mark.slow)])
def test_where_all_is_elsewhere_there_are_zeros(platform: str):
    rows = rows_of(3, 128, 128, elsewhere=1.0)
    rows = rows._replace(experts=jax.tree.map(lambda w: w * jnp.nan, rows.experts))
    out, (to_x, to_shares, to_experts) = results(ON[platform], rows)
    assert not any(np.asarray(x).any() for x in (out, to_x, to_shares, *to_experts))


def kept(weight: jax.Array, weights: Any) -> QuantizedWeight:
    like = abstract_weight(weight.shape, 1, weights)
    assert isinstance(like, QuantizedWeight)
    return quantize(weight, like)


@pytest.mark.parametrize("weights", ["int8", pytest.param("fp8", marks=pytest.mark.slow)])
def test_quantized_experts_are_multiplied_and_scaled(weights: Any):
    x, chosen, shares, experts, _ = rows_of(3, 32, 48)
    stored: Any = tuple(
        kept(w * (1 + jnp.arange(w.shape[1])[None, :, None]), weights) for w in experts
    )
    assert all(map(KERNELS["gpu"].takes, stored)) and not any(map(KERNELS["tpu"].takes, stored))
    compute = jax.jit(mlp_by_expert, static_argnums=(4, 5))
    wanted = np.asarray(compute(stored, x, chosen, shares, 1, ANYWHERE))
    got = compute(stored, x, chosen, shares, 1, ON["cpu"])
    np.testing.assert_allclose(got, wanted, rtol=0, atol=1e-5 * np.abs(wanted).max())


@pytest.mark.parametrize("platform", ["cpu", pytest.param("tpu", marks=pytest.mark.slow)])
def test_adapters_of_experts_are_multiplied_beside_their_weights(platform: str):
    x, chosen, shares, experts, _ = rows_of(3, 128, 128)
    adapted: Any = tuple(
        AdaptedWeight(w, jnp.flip(w[:, :16]), jnp.flip(w[:, :, :16]) / 16) for w in experts
    )
    compute = jax.jit(mlp_by_expert, static_argnums=(4, 5))
    merged = tuple(w.weight + jnp.einsum("eor,eri->eoi", w.b, w.a) for w in adapted)
    wanted = np.asarray(compute(merged, x, chosen, shares, 1, ANYWHERE))
    got = compute(adapted, x, chosen, shares, 1, ON[platform])
    np.testing.assert_allclose(got, wanted, rtol=0, atol=3e-5 * np.abs(wanted).max())


def test_weights_that_no_kernel_takes_are_multiplied_by_plain_operations():
    """Of dimensions that a GPU's or a TPU's kernel does not divide, and ranks of adapters."""
    x, chosen, shares, experts, _ = rows_of(3, 24, 32)
    rank = jax.ShapeDtypeStruct((EXPERTS, 8, 128), jnp.float32)
    behind = jax.ShapeDtypeStruct((EXPERTS, 128, 8), jnp.float32)
    whole = jax.ShapeDtypeStruct((EXPERTS, 128, 128), jnp.float32)
    for kernels in ON.values():
        assert takes_weight(kernels, whole)
        assert not takes_weight(kernels, AdaptedWeight(whole, rank, behind))
        assert not any(takes_weight(kernels, w) for w in experts)
    assert not takes_weight(ON["tpu"], jax.ShapeDtypeStruct((EXPERTS, 144, 128), jnp.float32))
    got = mlp_by_expert(experts, x, chosen, shares, 1, ON["cpu"])
    np.testing.assert_array_equal(got, mlp_by_expert(experts, x, chosen, shares, 1, ANYWHERE))


class ByKernels(Partition):
    @property
    def kernels(self) -> Kernels:
        return ON["cpu"]


@pytest.mark.parametrize(("partition", "count"), [(ByKernels(), 3), (Partition(), 0)])
def test_a_layer_of_a_model_is_computed_by_the_kernels_of_its_devices(partition, count):
    layer = Experts(preset("tiny-moe"), keys=Keys(jax.random.key(0)))
    x = jnp.ones((2, 3, preset("tiny-moe").embed_dim))
    text = str(jax.make_jaxpr(lambda x: layer(x, jnp.ones((2, 3), bool), None, partition)[0])(x))
    assert text.count("name=by_expert") == count


def compiled(
    target: str, rows: int, here: int, way: str = "kernel", passes: str = "forward"
) -> Any:
    """See `compiled_experts.py`."""
    command = [sys.executable, str(WORKER), target, str(rows), str(here), way, passes]
    done = subprocess.run(
        command, env=environment(Target.parse(target)), capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.cross_compile
@pytest.mark.parametrize("here", [16, 128])
def test_a_layer_of_experts_compiled_for_a_gpu_has_small_temporaries(here: int):
    assert compiled("h100:1", 512, here)["temporaries"] <= 32 << 20


@pytest.mark.cross_compile
@pytest.mark.parametrize("way", ["int8", "fp8"])
def test_quantized_experts_are_compiled_for_a_gpu(way: str):
    assert compiled("h100:1", 64, 16, way)["kernels"] == 3


@pytest.mark.cross_compile
def test_gradients_of_experts_are_compiled_for_a_gpu():
    """Two kernels of each product are of its gradients; the last product nobody asks for."""
    assert compiled("h100:1", 512, 128, passes="backward")["kernels"] == 8


@pytest.mark.cross_compile
def test_a_layer_of_experts_compiled_for_a_tpu_reads_each_expert_once():
    """16 rows with 8 experts each, and 16 experts: 128 rows of 2048 x 768 for each product."""
    found = compiled("v5e:1x1", 16, 16)
    assert found["kernels"] == 3
    product = 2 * 128 * 2048 * 768
    assert 3 * product <= found["flops"] <= 3.1 * product
    weights = 3 * 16 * 2048 * 768 * 2
    assert weights <= found["bytes"] <= 1.15 * weights


@pytest.mark.cross_compile
def test_gradients_of_experts_are_compiled_for_a_tpu():
    assert compiled("v5e:1x1", 512, 128, passes="backward")["kernels"] == 8
