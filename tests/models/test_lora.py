"""Low-rank adapters: what a policy with them computes, which layers have one, how they begin."""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pat_jax.common.errors import UserError
from pat_jax.models.adapted_weight import AdaptedWeight
from pat_jax.models.config import ModelConfig
from pat_jax.models.layers import FEW_TOKENS, linear
from pat_jax.models.lora import Adapters, Lora
from pat_jax.models.policy import Params, Policy
from pat_jax.models.presets import preset
from tests.lossless import EXPERTS, MODELS

POLICY = Policy.from_config(preset("tiny", vocab_size=61))
MOE = Policy.from_config(preset("tiny-moe", vocab_size=61))
# BigMac is in the tests of layers, layouts and switches.
SOME = MODELS | {name: EXPERTS[name] for name in ("moe", "mixtral")}
LINEAR = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def lora(*targets: str, policy: Policy = POLICY, rank: int = 3, alpha: float = 7.0) -> Lora:
    return Lora.of(policy, rank=rank, alpha=alpha, targets=targets)


def weights(policy: Policy) -> Params:
    rng = np.random.default_rng(0)
    return jax.tree.map(
        lambda x: jnp.asarray(rng.normal(x.ndim == 1, 0.2, x.shape), jnp.float32),
        policy.abstract_params,
    )


def trained(adapters: Lora) -> Adapters:
    """As if they had learned something: b is not zero."""
    rng = np.random.default_rng(1)
    return jax.tree.map(
        lambda x: jnp.asarray(rng.normal(0, 0.1, x.shape), jnp.float32), adapters.abstract_params
    )


def logits(policy: Policy, params: Params) -> np.ndarray:
    return np.asarray(_logits(policy.config, params))


@partial(jax.jit, static_argnums=0)
def _logits(config: ModelConfig, params: Params) -> jax.Array:
    tokens = jnp.asarray(np.random.default_rng(2).integers(0, 61, (2, 40)))
    positions = jnp.broadcast_to(jnp.arange(40), tokens.shape)
    model = Policy.from_config(config).bind(params)
    return model.logits(model(tokens, positions)[0])


@settings(deadline=None, max_examples=10)
@given(
    out=st.lists(st.integers(1, 5), min_size=1, max_size=3),
    into=st.lists(st.integers(1, 5), min_size=1, max_size=3),
    rank=st.integers(1, 6),
    tokens=st.sampled_from([1, 5, FEW_TOKENS + 1]),
)
def test_a_product_is_that_with_the_sum(out: list[int], into: list[int], rank: int, tokens: int):
    rng = np.random.default_rng(0)
    x, weight = rng.normal(size=(tokens, *into)), rng.normal(size=(*out, *into))
    a, b = rng.normal(size=(rank, *into)), rng.normal(size=(*out, rank))
    whole = weight + np.tensordot(b, a, axes=1)
    expected = np.tensordot(x, whole, axes=(range(1, x.ndim), range(-len(into), 0)))
    adapted = AdaptedWeight(*(jnp.asarray(each, jnp.float32) for each in (weight, a, b)))
    found = linear(jnp.asarray(x, jnp.float32), adapted, contracted=len(into))
    np.testing.assert_allclose(found, expected, atol=1e-4)
    np.testing.assert_allclose(adapted.merged(), whole, atol=1e-5)


OF_EXPERTS = ("experts.gate_up_proj", "experts.down_proj", "gate.weight")


@pytest.mark.parametrize(
    "name", [pytest.param(x, marks=[pytest.mark.slow] * (x in ("mixtral", "kv1"))) for x in SOME]
)
def test_merged_and_unmerged_logits_are_equal(name: str):
    policy = Policy.from_config(SOME[name])
    adapters = lora("all-linear", *(OF_EXPERTS if name in EXPERTS else ()), policy=policy)
    base, learned = weights(policy), trained(adapters)
    attached = logits(policy, adapters.attach(base, learned))
    merged = logits(policy, adapters.merge(base, learned))
    assert np.abs(attached - logits(policy, base)).max() > 0.1
    np.testing.assert_allclose(attached, merged, atol=1e-5 * max(1, np.abs(merged).max()), rtol=0)


def test_weights_of_experts_are_counted_and_those_of_a_token():
    """Gate and up have one a, whose rank may be twice that of others."""
    adapters = replace(lora(*OF_EXPERTS, policy=MOE), doubles_gate_up=True)
    assert len(adapters.modules) == 3 * 2
    each = 8 * (6 * (32 + 2 * 16) + 3 * (16 + 32))  # of the experts of a layer
    assert adapters.num_weights == 2 * (each + 3 * (32 + 8))
    assert adapters.active_weights == 2 * (each // 4 + 3 * (32 + 8))


def test_new_adapters_change_nothing():
    """Of experts, and of a layer without."""
    adapters = lora("all-linear", *OF_EXPERTS, policy=MOE)
    base, new = weights(MOE), adapters.init(5)
    np.testing.assert_array_equal(
        logits(MOE, adapters.attach(base, new)), logits(MOE, adapters.merge(base, new))
    )
    np.testing.assert_array_equal(logits(MOE, adapters.merge(base, new)), logits(MOE, base))


@pytest.mark.parametrize("preset_name", ["demo", "demo-moe"])
def test_they_begin_as_peft_has_it(preset_name: str):
    """a uniform in ±1/√fan_in, b zero; another seed gives others, each layer its own."""
    policy = Policy.from_config(preset(preset_name))
    targets = ("all-linear",) if preset_name == "demo" else OF_EXPERTS
    adapters = lora(*targets, policy=policy, rank=64)
    new, other = adapters.init(5), adapters.init(6)
    for name, adapter in new.items():
        num_stack = int("experts" in name)
        a, fan_in = np.asarray(adapter.a), np.prod(adapter.a.shape[1 + num_stack :])
        assert a.shape[num_stack] == 64 and np.abs(a).max() <= fan_in**-0.5
        assert a.std() == pytest.approx((3 * fan_in) ** -0.5, rel=0.05)
        assert not any(np.asarray(b).any() for b in jax.tree.leaves(adapter.b))
        assert not np.array_equal(a, np.asarray(other[name].a))
    flat = [np.asarray(adapter.a).ravel()[:32] for adapter in new.values()]
    assert len({x.tobytes() for x in flat}) == len(flat)


@pytest.mark.parametrize(
    ("targets", "expected"),
    [
        (["all-linear"], {(i, name) for i in (0, 1) for name in LINEAR}),
        (["q_proj", "v_proj"], {(i, name) for i in (0, 1) for name in ("q_proj", "v_proj")}),
        (["layers.1.mlp.down_proj"], {(1, "down_proj")}),
        (["mlp.up_proj", "layers.0.self_attn.o_proj"], {(0, "up_proj"), (1, "up_proj"), (0, "o_proj")}),
    ],
)  # fmt: skip
def test_targets_are_ends_of_names(targets: list[str], expected: set[tuple[int, str]]):
    modules = lora(*targets).modules
    assert {(int(x.split(".")[2]), x.split(".")[-1]) for x in modules} == expected


def test_of_a_model_with_experts_attention_has_adapters_and_experts_by_name():
    """Its layer 1 has an MLP, which PEFT cannot tell from experts by the names of its layers."""

    def found(*targets: str) -> set[str]:
        modules = lora(*targets, policy=MOE).modules
        return {module.removeprefix("model.layers.") for module in modules}

    attention = {f"{i}.self_attn.{name}" for i in (0, 1, 2) for name in LINEAR[:4]}
    assert found("all-linear") == attention
    assert found("layers.1.self_attn.o_proj") == {"1.self_attn.o_proj"}
    assert found("gate_up_proj") == {f"{i}.mlp.experts.gate_up_proj" for i in (0, 2)}
    assert found("mlp.experts.down_proj", "layers.2.mlp.experts.gate_up_proj") == {
        *(f"{i}.mlp.experts.down_proj" for i in (0, 2)),
        "2.mlp.experts.gate_up_proj",
    }
    assert found("gate.weight") == {"0.mlp.gate", "2.mlp.gate"}
    assert found("all-linear", *OF_EXPERTS) == attention | found(*OF_EXPERTS)


NONE = (
    *("gate_proj", "mlp.down_proj", "layers.1.mlp.up_proj", "mlp.experts", "mlp.gate_up_proj"),
    *("layers.0.mlp.experts.3.down_proj", "layers.1.mlp.experts.down_proj", "router", "w1"),
)


@pytest.mark.parametrize("target", NONE)
def test_a_target_that_names_no_adapter_of_experts_is_refused_in_its_own_words(target: str):
    with pytest.raises(UserError, match=r"option --lora\.targets is") as error:
        lora("q_proj", target, policy=MOE)
    message = str(error.value)
    assert f"{target!r}: no linear layer of the model is called that" in message
    assert "that is k_proj, o_proj, q_proj, v_proj, down_proj, gate_up_proj, gate, or" in message
    assert "while no MLP beside experts has an adapter" in message
    assert "\n" not in message and ". " not in message


@pytest.mark.parametrize("target", ["qproj", "proj", "embed_tokens", "experts.down_proj", "q_norm", "layers.7.q_proj"])  # fmt: skip
def test_a_target_that_no_layer_is_called_is_refused(target: str):
    with pytest.raises(UserError, match=r"option --lora\.targets is") as error:
        lora("v_proj", target)
    message = str(error.value)
    assert repr(target) in message and "\n" not in message and "the nearest is" in message
    assert all(name in message for name in [*LINEAR, "all-linear"])
    if target in ("qproj", "layers.7.q_proj"):
        assert "the nearest is 'q_proj'" in message
