"""Live comparison with transformers and PyTorch, in both directions (needs the `parity` extra)."""

import json
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pat_jax.models.checkpoints.hf_export import export
from pat_jax.models.checkpoints.hf_load import check_checkpoint, load_params
from pat_jax.models.policy import Policy

torch = pytest.importorskip("torch", reason="needs the `parity` extra")

from make_reference import build, logits  # noqa: E402 - they import torch
from safetensors.torch import load_file, save_file  # noqa: E402
from transformers import AutoConfig, AutoModelForCausalLM  # noqa: E402

CASES = ("llama", "llama-tied", "qwen2", "qwen2-tied", "qwen3", "qwen3-tied")
TOKENS = np.random.default_rng(2).integers(0, 61, (2, 50))


def our_logits(policy, params):
    positions = jnp.broadcast_to(jnp.arange(TOKENS.shape[1]), TOKENS.shape)
    model = policy.bind(params)
    return np.asarray(model.logits(model(TOKENS, positions)[0]))[..., : policy.config.vocab_size]


def their_logits(model):
    return logits(model.float().eval(), torch.from_numpy(TOKENS)).numpy()


@pytest.mark.parametrize("case", CASES)
def test_a_checkpoint_of_transformers_gives_its_logits(tmp_path, case):
    theirs = build(case)
    theirs.save_pretrained(tmp_path, max_shard_size="20KB")  # several files
    assert (tmp_path / "model.safetensors.index.json").exists()
    policy = Policy.from_config(check_checkpoint(tmp_path))
    params = load_params(tmp_path, policy, None, jnp.float32)
    expected = their_logits(theirs)
    assert np.ptp(expected) > 1
    np.testing.assert_allclose(our_logits(policy, params), expected, atol=2e-4, rtol=0)


@pytest.mark.parametrize("stored", ["lm_head", "float64", "rope_theta beside"])
def test_other_forms_of_a_checkpoint_give_its_logits(tmp_path, stored):
    """A tied tensor under its other name, numbers of eight bytes, fields of the older form."""
    theirs = build("qwen2-tied")
    theirs.save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    config = json.loads((tmp_path / "config.json").read_text())
    if stored == "lm_head":
        tensors["lm_head.weight"] = tensors.pop("model.embed_tokens.weight")
    elif stored == "float64":
        tensors = {name: x.double() for name, x in tensors.items()}
    else:
        config |= {"rope_theta": 333.0, "rope_parameters": {"rope_type": "default"}}
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    (tmp_path / "config.json").write_text(json.dumps(config))
    expected = their_logits(AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32))
    policy = Policy.from_config(check_checkpoint(tmp_path))
    params = load_params(tmp_path, policy, None, jnp.float32)
    np.testing.assert_allclose(our_logits(policy, params), expected, atol=2e-4, rtol=0)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("case", CASES)
def test_an_export_of_ours_gives_its_logits_in_transformers(tmp_path, case, dtype):
    """Weights go out in `dtype`; both sides then compute in float32 from what was written."""
    source = build(case)
    source.save_pretrained(tmp_path / "source")
    policy = Policy.from_config(check_checkpoint(tmp_path / "source"))
    params = load_params(tmp_path / "source", policy, None, jnp.float32)
    export(tmp_path / "out", policy, params, dtype, max_shard_bytes=20_000)

    loaded: Any = AutoModelForCausalLM.from_pretrained(
        tmp_path / "out", output_loading_info=True, dtype=torch.float32
    )
    theirs, report = loaded
    assert type(theirs) is type(source)
    assert not any(report[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    rounded = jax.tree.map(lambda x: x.astype(dtype).astype(jnp.float32), params)
    np.testing.assert_allclose(our_logits(policy, rounded), their_logits(theirs), atol=2e-4, rtol=0)


@pytest.mark.parametrize("case", CASES)
def test_the_exported_configuration_says_what_the_source_said(tmp_path, case):
    source = build(case)
    source.save_pretrained(tmp_path / "source")
    policy = Policy.from_config(check_checkpoint(tmp_path / "source"))
    params = load_params(tmp_path / "source", policy, None, jnp.float32)
    export(tmp_path / "out", policy, params, jnp.bfloat16, tmp_path / "source")
    ours, theirs = AutoConfig.from_pretrained(tmp_path / "out").to_dict(), source.config.to_dict()
    assert ours.pop("dtype") == "bfloat16"
    ignored = {"dtype", "transformers_version", "_name_or_path"}
    assert {name: ours.get(name) for name in theirs.keys() - ignored} == {
        name: theirs[name] for name in theirs.keys() - ignored
    }
