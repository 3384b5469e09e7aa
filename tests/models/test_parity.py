"""Live comparison with transformers and PyTorch, in both directions (needs the `parity` extra)."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pat_jax.models.checkpoints.hf_export import export
from pat_jax.models.experts import NO_TOKEN
from pat_jax.rl.algorithm import balance

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
