"""Low-rank adapters: what a policy with them computes, which layers have one, how they begin."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pat_jax.common.errors import UserError
from pat_jax.models.adapted_weight import AdaptedWeight
from pat_jax.models.checkpoints.hf_tensors import hf_tensors
from pat_jax.models.layers import FEW_TOKENS, linear
from pat_jax.models.lora import Adapters, Lora
from pat_jax.models.policy import Params, Policy
from pat_jax.models.presets import preset
from tests.lossless import EXPERTS, MODELS

POLICY = Policy.from_config(preset("tiny", vocab_size=61))
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
    tokens = jnp.asarray(np.random.default_rng(2).integers(0, 61, (2, 40)))
    positions = jnp.broadcast_to(jnp.arange(40), tokens.shape)
    model = policy.bind(params)
    return np.asarray(model.logits(model(tokens, positions)[0]))


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


@pytest.mark.parametrize("name", list(SOME))
def test_merged_and_unmerged_logits_are_equal(name: str):
    policy = Policy.from_config(SOME[name])
    adapters = lora("all-linear", policy=policy)
    base, learned = weights(policy), trained(adapters)
    attached = logits(policy, adapters.attach(base, learned))
    merged = logits(policy, adapters.merge(base, learned))
    assert np.abs(attached - logits(policy, base)).max() > 0.1
    np.testing.assert_allclose(attached, merged, atol=1e-5 * max(1, np.abs(merged).max()), rtol=0)


def test_what_is_merged_is_the_weight_and_the_scaled_product():
    """By the shapes that checkpoints have, in float64."""
    adapters = lora("all-linear")
    base, learned = weights(POLICY), trained(adapters)
    tensors = jax.tree.leaves(hf_tensors(POLICY))
    merged = jax.tree.leaves(adapters.merge(base, learned))
    count = 0
    for tensor, x, found in zip(tensors, jax.tree.leaves(base), merged, strict=True):
        expected = tensor.to_stored(np.asarray(x)).astype(np.float64)
        if tensor.module in learned:
            a, b = (np.asarray(y, np.float64) for y in jax.tree.leaves(learned[tensor.module]))
            expected += 7 / 3 * b.reshape(-1, 3) @ a.reshape(3, -1)
            count += 1
        np.testing.assert_allclose(tensor.to_stored(np.asarray(found)), expected, atol=1e-6)
    assert count == 7 * POLICY.config.num_layers == len(adapters.modules)


def test_new_adapters_change_nothing():
    adapters = lora("all-linear")
    base, new = weights(POLICY), adapters.init(5)
    np.testing.assert_array_equal(
        logits(POLICY, adapters.attach(base, new)), logits(POLICY, adapters.merge(base, new))
    )
    np.testing.assert_array_equal(logits(POLICY, adapters.merge(base, new)), logits(POLICY, base))


def test_they_begin_as_peft_has_it():
    """a uniform in ±1/√fan_in, b zero; another seed gives others, each layer its own."""
    policy = Policy.from_config(preset("demo"))
    adapters = lora("all-linear", policy=policy, rank=64)
    new, other = adapters.init(5), adapters.init(6)
    for name, adapter in new.items():
        a, fan_in = np.asarray(adapter.a), np.prod(adapter.a.shape[1:])
        assert a.shape[0] == 64 and np.abs(a).max() <= fan_in**-0.5
        assert a.std() == pytest.approx((3 * fan_in) ** -0.5, rel=0.05)
        assert not np.asarray(adapter.b).any()
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


MOE = Policy.from_config(preset("tiny-moe", vocab_size=61))


def test_of_a_model_with_experts_attention_has_adapters():
    """Its layer 1 has an MLP, which PEFT cannot tell from experts by the names of its layers."""
    modules = lora("all-linear", policy=MOE).modules
    found = {(int(x.split(".")[2]), x.split(".")[-1]) for x in modules}
    assert found == {(i, name) for i in (0, 1, 2) for name in LINEAR[:4]}
    assert len(modules) == 12
    assert set(lora("v_proj", "layers.1.self_attn.o_proj", policy=MOE).kinds) == {
        "v_proj",
        "o_proj",
    }


OF_EXPERTS = (
    *("gate_proj", "mlp.down_proj", "layers.1.mlp.up_proj", "experts.gate_up_proj", "mlp.experts"),
    *("layers.0.mlp.experts.3.down_proj", "mlp.gate", "router", "w1"),
)


@pytest.mark.parametrize("target", OF_EXPERTS)
def test_a_target_that_names_experts_is_refused_in_its_own_words(target: str):
    with pytest.raises(UserError, match=r"option --lora\.targets is") as error:
        lora("q_proj", target, policy=MOE)
    message = str(error.value)
    assert f"{target!r}: in a model with experts no MLP, expert or router has an adapter" in message
    assert "that is k_proj, o_proj, q_proj, v_proj, or all-linear" in message
    assert "\n" not in message and ". " not in message
    with pytest.raises(UserError, match="no linear layer of the model is called that"):
        lora("qq_proj", policy=MOE)


@pytest.mark.parametrize("name", ["q_proj", "k_proj"])
def test_a_bias_is_no_weight(name: str):
    """Of Qwen2, whose projections have both."""
    policy = Policy.from_config(preset("qwen2.5-7b"))
    adapters = lora(name, policy=policy)
    assert len(adapters.modules) == policy.config.num_layers
    shapes = {x.a.shape for x in adapters.abstract_params.values()}
    assert shapes == {(3, policy.config.embed_dim)}


@pytest.mark.parametrize("target", ["qproj", "proj", "embed_tokens", "lm_head", "q_norm", "layers.7.q_proj"])  # fmt: skip
def test_a_target_that_no_layer_is_called_is_refused(target: str):
    with pytest.raises(UserError, match=r"option --lora\.targets is") as error:
        lora("v_proj", target)
    message = str(error.value)
    assert repr(target) in message and "\n" not in message and "the nearest is" in message
    assert all(name in message for name in [*LINEAR, "all-linear"])
    if target in ("qproj", "layers.7.q_proj"):
        assert "the nearest is 'q_proj'" in message
