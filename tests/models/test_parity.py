"""Live comparison with transformers and PyTorch, in both directions (needs the `parity` extra)."""

from copy import deepcopy
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file
from supervised_cases import learned, make_examples, packed

from pat_jax.models.checkpoints.hf_export import export
from pat_jax.models.checkpoints.hf_load import check_checkpoint
from pat_jax.models.experts import NO_TOKEN
from pat_jax.models.policy import Policy
from pat_jax.rl.algorithm import balance
from pat_jax.rl.batches.train_batch import MicroBatch
from tests.lossless import EXPERTS, lively_params

torch = pytest.importorskip("torch", reason="needs the `parity` extra")

from both_sides import TOKENS, our_logits, ours_of, their_logits  # noqa: E402 - they import torch
from make_reference import build  # noqa: E402
from transformers import AutoConfig, AutoModelForCausalLM  # noqa: E402
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func  # noqa: E402

FAMILIES = ("llama", "qwen2", "qwen3", "qwen3_moe", "mixtral")
CASES = [f"{family}{tied}" for family in FAMILIES for tied in ("", "-tied")]


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("case", CASES)
def test_an_export_of_ours_gives_its_logits_in_transformers(tmp_path, case, dtype):
    """Weights go out in `dtype`; both sides then compute in float32 from what was written."""
    source = build(case)
    source.save_pretrained(tmp_path / "source")
    policy, params = ours_of(tmp_path / "source")
    export(tmp_path / "out", policy, params, dtype, max_shard_bytes=20_000)

    loaded: Any = AutoModelForCausalLM.from_pretrained(
        tmp_path / "out", output_loading_info=True, dtype=torch.float32
    )
    theirs, report = loaded
    assert type(theirs) is type(source)
    assert not any(report[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    stored, found = getattr(torch, jnp.dtype(dtype).name), theirs.state_dict()
    for name, tensor in source.state_dict().items():
        assert torch.equal(found[name], tensor.to(stored).float()), name
    rounded = jax.tree.map(lambda x: x.astype(dtype).astype(jnp.float32), params)
    np.testing.assert_allclose(our_logits(policy, rounded), their_logits(theirs), atol=2e-4, rtol=0)


def test_experts_are_in_the_layers_that_transformers_has_them_in(tmp_path):
    """`decoder_sparse_step` says it in steps; an export names the others."""
    source = build("qwen3_moe")
    fields = source.config.to_dict() | {"num_hidden_layers": 7, "decoder_sparse_step": 3}
    wider = type(source)(type(source.config).from_dict(fields | {"mlp_only_layers": [0, 5]}))
    wider.save_pretrained(tmp_path / "source")
    policy, params = ours_of(tmp_path / "source")
    assert policy.config.sparse_layers == (2,)
    export(tmp_path / "out", policy, params, jnp.float32)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)
    expected = wider.state_dict()
    assert theirs.state_dict().keys() == expected.keys()
    assert all(torch.equal(x, expected[name]) for name, x in theirs.state_dict().items())


@pytest.mark.parametrize("case", ["qwen3_moe", "mixtral"])
def test_the_balance_loss_of_a_layer_is_that_of_transformers(tmp_path, case):
    """Over real tokens, by the routers' logits of each model."""
    source = build(case).float().eval()
    source.save_pretrained(tmp_path)
    policy, params = ours_of(tmp_path)
    experts, is_real = policy.config.experts, np.arange(50) < np.array([[50], [29]])
    assert experts is not None
    with torch.no_grad():
        mask = torch.from_numpy(is_real).long()
        given = torch.from_numpy(TOKENS)
        theirs = source(given, attention_mask=mask, output_router_logits=True).router_logits
    tokens: Any = np.where(is_real, TOKENS, NO_TOKEN)
    positions: Any = np.broadcast_to(np.arange(50), TOKENS.shape)
    _, _, routed = policy.bind(params)(tokens, positions)
    assert len(theirs) == len(routed.load) > 1
    counts = experts.num_experts, experts.num_experts_per_tok
    of_layers = [float(load_balancing_loss_func((one,), *counts, mask)) for one in theirs]
    assert max(of_layers) > 1.01 * experts.num_experts_per_tok
    sums = {balance.TOKENS: is_real.sum(), balance.LOAD: routed.load}
    ours = balance.switch_loss(sums | {balance.PROBABILITY: routed.probability})
    assert float(ours) == pytest.approx(np.mean(of_layers), rel=1e-6)


OF_HEADS = [f"{family}-{head}" for family in FAMILIES for head in ("sequence", "token")]


@pytest.mark.parametrize("case", [*CASES, *OF_HEADS])
def test_the_exported_configuration_says_what_the_source_said(tmp_path, case):
    source = build(case)
    source.save_pretrained(tmp_path / "source")
    policy, params = ours_of(tmp_path / "source")
    export(tmp_path / "out", policy, params, jnp.bfloat16, tmp_path / "source")
    ours, theirs = AutoConfig.from_pretrained(tmp_path / "out").to_dict(), source.config.to_dict()
    assert ours.pop("dtype") == "bfloat16"
    ignored = {"dtype", "transformers_version", "_name_or_path"}
    assert {name: ours.get(name) for name in theirs.keys() - ignored} == {
        name: theirs[name] for name in theirs.keys() - ignored
    }


from transformers import NemotronHConfig, Qwen3MoeConfig, Qwen3MoeForCausalLM  # noqa: E402
from transformers.models.nemotron_h.modeling_nemotron_h import NemotronHMoE  # noqa: E402
from transformers.models.qwen3_moe.modeling_qwen3_moe import (  # noqa: E402
    Qwen3MoeExperts,
    Qwen3MoeTopKRouter,
)


def latent_form(config: Qwen3MoeConfig, latent_dim: int) -> NemotronHMoE:
    layer = NemotronHMoE(
        NemotronHConfig(
            hidden_size=config.hidden_size,
            n_routed_experts=config.num_experts,
            num_experts_per_tok=config.num_experts_per_tok,
            moe_intermediate_size=config.moe_intermediate_size,
            moe_latent_size=latent_dim,
            moe_shared_expert_intermediate_size=1,
        )
    )
    inner = deepcopy(config)
    inner.hidden_size = latent_dim
    layer.add_module("experts", Qwen3MoeExperts(inner))
    layer.add_module("gate", Qwen3MoeTopKRouter(config))
    for parameter in layer.shared_experts.parameters():
        torch.nn.init.zeros_(parameter)
    return layer


def theirs(directory: Path, latent_dim: int) -> Qwen3MoeForCausalLM:
    """The model of a directory of ours."""
    fields = check_checkpoint(directory)
    assert fields.experts is not None
    head: dict[str, Any] = {"head_dim": fields.head_dim}
    config = Qwen3MoeConfig(
        **head,
        vocab_size=fields.vocab_size,
        hidden_size=fields.embed_dim,
        num_hidden_layers=fields.num_layers,
        num_attention_heads=fields.num_heads,
        num_key_value_heads=fields.num_kv_heads,
        num_experts=fields.experts.num_experts,
        num_experts_per_tok=fields.experts.num_experts_per_tok,
        moe_intermediate_size=fields.experts.expert_dim,
        norm_topk_prob=fields.experts.norm_topk_prob,
        rms_norm_eps=fields.norm_eps,
        rope_parameters={"rope_type": "default", "rope_theta": fields.rope_theta},
        tie_word_embeddings=fields.tie_embeddings,
    )
    model = Qwen3MoeForCausalLM(config)
    stored = {
        name: torch.from_numpy(x) for name, x in load_file(directory / "model.safetensors").items()
    }
    for i, layer in enumerate(model.model.layers):
        layer.mlp = latent_form(config, latent_dim)
        experts = f"model.layers.{i}.mlp.experts"
        gate, up, down = (
            torch.stack([stored.pop(f"{experts}.{j}.{part}_proj.weight") for j in range(8)])
            for part in ("gate", "up", "down")
        )
        stored |= {
            f"{experts}.gate_up_proj": torch.cat([gate, up], 1),
            f"{experts}.down_proj": down,
        }
    found = model.load_state_dict(stored, strict=False)
    assert not found.unexpected_keys
    assert all(".shared_experts." in name for name in found.missing_keys)
    return model.float().eval()


def test_logits_are_those_of_the_parts_of_transformers(tmp_path):
    """Our directory's tensors have the names that those parts have."""
    policy = Policy.from_config(EXPERTS["bigmac"])
    export(tmp_path / "out", policy, jax.device_put(lively_params(policy)), jnp.float32)
    assert policy.config.experts is not None
    expected = their_logits(theirs(tmp_path / "out", policy.config.experts.latent_dim))
    ours = our_logits(*ours_of(tmp_path / "out"))
    assert np.ptp(expected) > 1
    np.testing.assert_allclose(ours, expected, atol=1e-5 * np.abs(expected).max(), rtol=0)


EXAMPLES = ("llama", "llama-tied", "qwen2", "qwen2-tied", "qwen3", "qwen3-tied")


def their_loss(model, micro: MicroBatch, num_tokens: int):
    """By the model's own loss, over the rows as they are packed."""
    starts = micro.positions == 0
    example = starts.cumsum(axis=1)  # each position of padding is one of its own
    sees = example[:, :, None] == example[:, None, :]
    sees &= np.tril(np.ones(sees.shape[1:], bool))
    shifted = np.where(micro.weights > 0, np.roll(micro.tokens, -1, axis=1), -100)
    labels = np.roll(shifted, 1, axis=1)  # they are shifted by the model
    labels[:, 0] = -100
    return model(
        input_ids=torch.from_numpy(micro.tokens).long(),
        position_ids=torch.from_numpy(micro.positions).long(),
        attention_mask=torch.from_numpy(sees)[:, None],
        labels=torch.from_numpy(labels).long(),
        num_items_in_batch=torch.tensor(num_tokens),
        use_cache=False,
    ).loss


@pytest.mark.parametrize("case", EXAMPLES)
def test_loss_and_gradients_are_those_of_transformers(tmp_path, case):
    model = build(case).float()
    model.save_pretrained(tmp_path / "model")
    examples = make_examples()
    micro_batches = packed(examples)
    ours = learned(tmp_path / "model", micro_batches, tmp_path)

    num_tokens = sum(int(one.in_loss.sum()) for one in examples)
    losses = [their_loss(model, micro, num_tokens) for micro in micro_batches]
    loss = torch.stack(losses).sum()
    loss.backward()
    theirs = {name: x.grad.numpy() for name, x in model.named_parameters() if x.grad is not None}

    assert ours.loss == pytest.approx(loss.item(), rel=1e-5)
    assert ours.gradients.keys() == theirs.keys()
    for name, gradient in theirs.items():
        size = np.abs(gradient).max()
        assert size > 1e-4, name
        np.testing.assert_allclose(ours.gradients[name], gradient, atol=1e-4 * size, err_msg=name)
