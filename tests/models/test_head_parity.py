"""Scalar heads, live against transformers' classes, in both directions (needs the `parity` extra)."""

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pat_jax.layout.chain import layout_chain
from pat_jax.layout.mesh import factored_mesh
from pat_jax.layout.partitions import AutoPartition
from pat_jax.models.checkpoints.hf_export import export
from pat_jax.models.checkpoints.hf_load import check_checkpoint, load_params
from pat_jax.models.policy import Policy
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
