"""Experts that see a quarter of a token's numbers (BigMac): the layer, its gradients in every layout,
its checkpoints, and what is refused."""

import json
from dataclasses import replace
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

from pat_jax.common.errors import UserError
from pat_jax.layout.chain import layout_chain
from pat_jax.layout.mesh import factored_mesh
from pat_jax.layout.partitions import AutoPartition
from pat_jax.models.checkpoints.hf_config import read_config, to_hf_config
from pat_jax.models.checkpoints.hf_export import export
from pat_jax.models.checkpoints.hf_load import check_checkpoint
from pat_jax.models.experts import Experts
from pat_jax.models.lora import Lora
from pat_jax.models.parameters import Keys
from pat_jax.models.partition import Partition
from pat_jax.models.policy import Params, Policy
from pat_jax.models.presets import preset
from tests.lossless import EXPERTS, lively_params

CONFIG = replace(EXPERTS["bigmac"], num_layers=1)
POLICY = Policy.from_config(CONFIG)
CHAIN = {str(k): v for k, v in layout_chain(factored_mesh(jax.devices()), CONFIG)[0].items()}
# Of a layer: a width of 32, of which experts see 8; 8 experts of 64 units, two for each token.
SHAPES = {
    "router": (8, 32),
    "gate": (8, 64, 8),
    "up": (8, 64, 8),
    "down": (8, 8, 64),
    "descend": (8, 32),
    "ascend": (32, 8),
}
ROWS, LENGTH = 4, 16
RNG = np.random.default_rng(0)
WEIGHTS = {name: RNG.normal(0, 0.4, shape).astype(np.float32) for name, shape in SHAPES.items()}
TOKENS, TOWARD = (RNG.normal(size=(ROWS, LENGTH, 32)).astype(np.float32) for _ in range(2))


def layer(weights: Any, x: Any) -> Any:
    experts = Experts(CONFIG, keys=Keys(jax.random.key(0)))
    for name, value in weights.items():
        getattr(experts, name).set_value(value)
    return experts(x, jnp.ones((ROWS, LENGTH), bool), None, Partition())[0]


def dense(weights: Any, x: Any) -> Any:
    """(Σ pᵢ(x) · Eᵢ(x · descend)) · ascend over all experts, those that are not chosen times 0."""
    logits = jnp.einsum("rle,ne->rln", x, weights["router"])
    least = jnp.sort(logits, axis=-1)[..., -2, None]
    shares = jax.nn.softmax(jnp.where(logits >= least, logits, -jnp.inf), axis=-1)
    seen = jnp.einsum("rle,de->rld", x, weights["descend"])
    gated = jax.nn.silu(jnp.einsum("rld,nmd->rlnm", seen, weights["gate"]))
    gated = gated * jnp.einsum("rld,nmd->rlnm", seen, weights["up"])
    each = jnp.einsum("rlnm,ndm->rlnd", gated, weights["down"])
    return jnp.einsum("rln,rlnd,ed->rle", shares, each, weights["ascend"])


def assert_close(got: Any, wanted: Any, bound: float = 1e-5) -> None:
    """Each leaf by the largest number that is wanted."""
    for one, other in zip(jax.tree.leaves(got), jax.tree.leaves(wanted), strict=True):
        largest = np.abs(other).max()
        assert one.shape == other.shape and largest > 0
        np.testing.assert_allclose(one, other, rtol=0, atol=bound * largest)


def test_the_layer_and_its_gradients_are_those_of_its_equation():
    """In float64. The router sees all of a token; what is sent between is a quarter of it."""

    def value_and_grad(function: Any, weights: Any, x: Any) -> Any:
        loss = lambda *args: jnp.sum(function(*args) * TOWARD)  # noqa: E731
        return function(weights, x), jax.grad(loss, argnums=(0, 1))(weights, x)

    got = jax.jit(partial(value_and_grad, layer))(WEIGHTS, TOKENS)
    with jax.enable_x64(True):
        exact = jax.tree.map(lambda x: jnp.asarray(x, jnp.float64), (WEIGHTS, TOKENS))
        wanted = jax.device_get(jax.jit(partial(value_and_grad, dense))(*exact))
    assert_close(got, wanted)


def test_a_new_layer_starts_with_experts_of_the_usual_size_between_isometries():
    """So Adam, whose steps are of one size, changes experts as it does without the narrower width."""
    policies = [Policy.from_config(preset(name)) for name in ("demo-bigmac", "demo-moe")]
    narrow, whole = (dict[str, Any](p.init(0)["layers"][1]["mlp"]) for p in policies)
    for name in ("gate", "up"):
        of_narrow, of_whole = (float(jnp.std(x[name][...])) for x in (narrow, whole))
        assert of_narrow == pytest.approx(of_whole, rel=0.03)
    for name in ("descend", "ascend"):
        stretched = np.linalg.svd(narrow[name][...], compute_uv=False)
        np.testing.assert_allclose(stretched, 2.0, rtol=1e-5)  # the root of 128 / 32


@cache
def gradients(name: str | None) -> Params:
    """Of all parameters of the model, in a layout or on one device, on the host."""
    tokens: Any = np.random.default_rng(1).integers(0, 61, (8, 12))
    toward = np.random.default_rng(2).normal(size=(8, 12, 64)).astype(np.float32)
    positions: Any = np.broadcast_to(np.arange(12), tokens.shape)
    partition = AutoPartition(CHAIN[name]) if name else Partition()

    def loss(params: Params) -> jax.Array:
        model = POLICY.bind(params)
        out = model(tokens, positions, partition=partition, remat="full")
        return jnp.sum(model.logits(out.hidden) * toward)

    params = jax.device_get(lively_params(POLICY))
    shardings = CHAIN[name].param_shardings(POLICY, "train") if name else None
    if name:
        params = jax.device_put(params, shardings)
    return jax.device_get(jax.jit(jax.grad(loss), out_shardings=shardings)(params))


@pytest.mark.parametrize(
    "name",
    [pytest.param(x, marks=[] if x == "dp2tp4" else pytest.mark.slow) for x in CHAIN],
)
def test_gradients_are_those_of_one_device_in_every_layout(name: str):
    assert [*CHAIN] == ["dp8tp1", "dp4tp2", "dp2tp4", "dp1tp8"]
    assert_close(gradients(name), gradients(None))


def test_a_checkpoint_has_two_shared_matrices_called_as_those_of_nemotron_h(tmp_path):
    policy = Policy.from_config(preset("tiny-bigmac"))
    export(tmp_path / "out", policy, policy.init(0), jnp.float32)
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert (config["model_type"], config["moe_latent_size"]) == ("bigmac", 8)
    assert config["architectures"] == ["BigMacForCausalLM"]
    tensors = load_file(tmp_path / "out" / "model.safetensors")
    shapes = {
        name: tensors[f"model.layers.0.mlp.{name}.weight"].shape
        for name in (
            "gate",
            "fc1_latent_proj",
            "fc2_latent_proj",
            "experts.7.gate_proj",
            "experts.7.down_proj",
        )
    }
    assert [*shapes.values()] == [(8, 32), (8, 32), (32, 8), (64, 8), (8, 64)]
    assert not any("latent" in name for name in tensors if ".layers.1." in name)
    assert check_checkpoint(tmp_path / "out") == replace(policy.config, vocab_multiple=128)


@pytest.mark.parametrize(
    ("name", "fields", "words"),
    [
        ("tiny-bigmac", {"moe_latent_size": None}, "'moe_latent_size' is None, expected a positive"),
        ("tiny-bigmac", {"moe_latent_size": 0}, "'moe_latent_size' is 0, expected a positive"),
        ("tiny-bigmac", {"moe_latent_size": 32}, r"is 32, expected less than hidden_size \(32\)"),
        ("tiny-moe", {"moe_latent_size": 8}, "'moe_latent_size' is 8, expected null in qwen3_moe"),
        ("tiny", {"moe_latent_size": 8}, "'moe_latent_size' is 8, expected null in qwen3;"),
    ],
)  # fmt: skip
def test_a_configuration_that_says_it_wrongly_is_refused(tmp_path, name, fields, words):
    config = to_hf_config(preset(name), jnp.float32) | fields
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match=words) as error:
        read_config(tmp_path)
    assert "\n" not in str(error.value)


def test_the_shared_matrices_are_quantized_and_have_no_adapters():
    policy = Policy.from_config(preset("tiny-bigmac"))
    mlp: Any = policy.with_weights("int8").abstract_params["layers"][0]["mlp"]
    shared = [
        mlp[name].get_value() if hasattr(mlp[name], "get_value") else mlp[name]
        for name in ("descend", "ascend")
    ]
    assert [(x.values.shape, x.scale.shape) for x in shared] == [((8, 32), (8,)), ((32, 8), (32,))]
    every = Lora.of(policy, rank=4, alpha=8.0, targets=["all-linear"])
    assert set(every.kinds) == {"q_proj", "k_proj", "v_proj", "o_proj"}
    with pytest.raises(UserError, match="'fc1_latent_proj'"):
        Lora.of(policy, rank=4, alpha=8.0, targets=["fc1_latent_proj"])
