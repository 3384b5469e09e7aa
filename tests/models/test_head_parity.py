"""Scalar heads, live against transformers' classes, in both directions (needs the `parity` extra)."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from arrays import assert_same_bits

from pat_jax.layout.chain import layout_chain
from pat_jax.layout.mesh import factored_mesh
from pat_jax.layout.partitions import AutoPartition
from pat_jax.models.checkpoints.hf_export import export
from pat_jax.models.checkpoints.hf_load import check_checkpoint, load_params
from pat_jax.models.checkpoints.peft_adapter import export_adapter, load_adapter, read_adapter
from pat_jax.models.lora import Lora
from pat_jax.models.policy import Params, Policy
from pat_jax.models.transformer import values as our_values

torch = pytest.importorskip("torch", reason="needs the `parity` extra")

from both_sides import ours_of  # noqa: E402
from make_reference import LENGTHS, PAD, build, padded_tokens, values  # noqa: E402 - they import torch
from transformers import (  # noqa: E402
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
)

FAMILIES = ("llama", "qwen2", "qwen3", "qwen3_moe", "mixtral")
HEADS: dict[str, Any] = {
    "sequence": AutoModelForSequenceClassification,
    "token": AutoModelForTokenClassification,
}
TOKENS = padded_tokens(2)
IDS = TOKENS.numpy()
LAST = np.array(LENGTHS) - 1


def computed(policy, params, head, partition=None, tokens=IDS):
    """What the class returns: values at the last tokens, or at all of them."""

    @jax.jit
    def compute(params, tokens):
        positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
        model = policy.bind(params)
        return our_values(model.scalar_head, model(tokens, positions, partition=partition).hidden)

    found = np.asarray(compute(params, tokens))
    return (
        found[np.arange(len(found)), np.resize(LAST, len(found))] if head == "sequence" else found
    )


def assert_equal(found, theirs, head):
    """To 1e-5 of the largest, over real tokens."""
    expected, is_real = values(theirs.float().eval(), TOKENS).numpy(), (TOKENS != PAD).numpy()
    if head == "sequence":
        is_real = np.ones(2, bool)
    largest = np.abs(expected[is_real]).max()
    assert largest > 0.1
    np.testing.assert_allclose(found[is_real], expected[is_real], atol=1e-5 * largest, rtol=0)


@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize("family", FAMILIES)
def test_they_are_those_of_transformers_both_ways(tmp_path, family, head):
    source = build(f"{family}-{head}")
    source.save_pretrained(tmp_path / "source")
    policy, params = ours_of(tmp_path / "source")
    assert_equal(computed(policy, params, head), source, head)

    export(tmp_path / "out", policy, params, jnp.float32, tmp_path / "source")
    loaded: Any = HEADS[head].from_pretrained(
        tmp_path / "out", output_loading_info=True, dtype=torch.float32
    )
    theirs, report = loaded
    assert type(theirs) is type(source)
    assert not any(report[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    found = theirs.state_dict()
    assert found.keys() == source.state_dict().keys()
    assert all(torch.equal(found[name], x) for name, x in source.state_dict().items())
    assert_equal(computed(policy, params, head), theirs, head)


@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_every_layout_computes_them(tmp_path, family, head):
    source = build(f"{family}-{head}")
    source.save_pretrained(tmp_path)
    # Heads padded, so that eight devices divide them.
    policy = Policy.from_config(replace(check_checkpoint(tmp_path), query_multiple=4))
    chain, _ = layout_chain(factored_mesh(jax.devices()), policy.config)
    assert [split.tp for split in chain] == [1, 2, 4, 8]
    for layout in chain.values():
        shardings = layout.param_shardings(policy, role="train")
        params = load_params(tmp_path, policy, shardings, jnp.float32)
        tokens = jax.device_put(np.tile(IDS, (4, 1)), layout.sharding("batch", role="train"))
        found = computed(policy, params, head, AutoPartition(layout), tokens)
        for rows in np.split(found, 4):
            assert_equal(rows, source, head)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_policy_of_transformers_becomes_a_critic(tmp_path, family):
    """Its layers are the policy's, and every value is the bias."""
    build(family).save_pretrained(tmp_path / "source")
    config = replace(check_checkpoint(tmp_path / "source", "scalar"), head_bias=True)
    policy = Policy.from_config(config)
    params: Any = load_params(tmp_path / "source", policy, None, jnp.float32)
    params["score_bias"] = params["score_bias"].replace(jnp.full(1, 0.25))
    export(tmp_path / "out", policy, params, jnp.float32)
    critic = AutoModelForTokenClassification.from_pretrained(tmp_path / "out")
    np.testing.assert_array_equal(values(critic.eval(), TOKENS), 0.25)
    layers = {k: x for k, x in build(family).state_dict().items() if k != "lm_head.weight"}
    found = critic.state_dict()
    assert all(torch.equal(found[name], x) for name, x in layers.items())


peft = pytest.importorskip("peft", reason="needs the `parity` extra")

from make_reference import padded_tokens  # noqa: E402 - they import torch
from transformers import (  # noqa: E402
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
)

# PEFT 0.21 asks transformers 5 under its old name.
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated")
CLASSES: dict[str, tuple[str, Any]] = {
    "sequence": ("SEQ_CLS", AutoModelForSequenceClassification),
    "token": ("TOKEN_CLS", AutoModelForTokenClassification),
}
READ = padded_tokens(2)[:1]  # a row without padding


def computed_with_adapters(policy: Policy, params: Params, head: str) -> np.ndarray:
    """What the class returns: the value at the last token, or at all of them."""
    positions, model = jnp.arange(READ.shape[1])[None], policy.bind(params)
    hidden = model(jnp.asarray(READ.numpy()), positions).hidden
    found = np.asarray(our_values(model.scalar_head, hidden))
    return found[:, -1] if head == "sequence" else found


def assert_close(ours: np.ndarray, model: Any) -> None:
    theirs = values(model.float().eval(), READ).numpy()
    largest = np.abs(theirs).max()
    assert largest > 0.1
    np.testing.assert_allclose(ours, theirs, rtol=0, atol=2e-5 * largest)


@pytest.mark.parametrize("head", CLASSES)
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_peft_loads_our_adapter_and_gives_its_values(tmp_path: Path, family: str, head: str):
    build(f"{family}-{head}").save_pretrained(tmp_path / "base")
    policy, params = ours_of(tmp_path / "base")
    lora = Lora.of(policy, rank=3, alpha=8.0, targets=["all-linear"])
    rng = np.random.default_rng(1)
    learned = jax.tree.map(
        lambda x: jnp.asarray(rng.normal(0, 0.2, x.shape), jnp.float32), lora.abstract_params
    )
    export_adapter(tmp_path / "adapter", lora, learned, tmp_path / "base")
    plain = CLASSES[head][1].from_pretrained(tmp_path / "base", dtype=torch.float32)
    theirs = peft.PeftModel.from_pretrained(plain, tmp_path / "adapter")
    assert (
        type(theirs).__name__
        == {
            "sequence": "PeftModelForSequenceClassification",
            "token": "PeftModelForTokenClassification",
        }[head]
    )
    assert_close(computed_with_adapters(policy, lora.attach(params, learned), head), theirs)
    assert_close(
        computed_with_adapters(policy, lora.merge(params, learned), head), theirs.merge_and_unload()
    )


# Of a TOKEN_CLS model PEFT 0.21 makes none of all linear layers: its score would be one of them.
@pytest.mark.parametrize(
    "head, targets",
    [
        ("sequence", "all-linear"),
        ("sequence", ["q_proj", "v_proj"]),
        ("token", ["q_proj", "v_proj"]),
    ],
)
def test_an_adapter_that_peft_has_trained_is_read(tmp_path: Path, head: str, targets: Any):
    task, auto_class = CLASSES[head]
    build(f"qwen3-{head}").save_pretrained(tmp_path / "base")
    torch.manual_seed(0)
    config = peft.LoraConfig(r=4, lora_alpha=7, task_type=task, target_modules=targets)
    base = auto_class.from_pretrained(tmp_path / "base", dtype=torch.float32)
    theirs = peft.get_peft_model(base, config)
    with torch.no_grad():
        for parameter in theirs.parameters():
            if parameter.requires_grad:
                parameter += 0.2 * torch.randn_like(parameter)
    theirs.save_pretrained(tmp_path / "adapter")
    policy, params = ours_of(tmp_path / "base")
    lora = read_adapter(tmp_path / "adapter", policy)
    learned = load_adapter(tmp_path / "adapter", lora)
    assert_close(computed_with_adapters(policy, lora.attach(params, learned), head), theirs)
    export_adapter(tmp_path / "ours", lora, learned, tmp_path / "base")
    assert_same_bits(load_adapter(tmp_path / "ours", lora), learned)
