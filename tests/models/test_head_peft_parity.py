"""Adapters of scalar heads, live against PEFT, in both directions (needs the `parity` extra)."""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from arrays import assert_same_bits

from pat_jax.models.checkpoints.peft_adapter import export_adapter, load_adapter, read_adapter
from pat_jax.models.lora import Lora
from pat_jax.models.policy import Params, Policy
from pat_jax.models.transformer import values as our_values

torch = pytest.importorskip("torch", reason="needs the `parity` extra")
peft = pytest.importorskip("peft", reason="needs the `parity` extra")

from both_sides import ours_of  # noqa: E402
from make_reference import build, padded_tokens, values  # noqa: E402 - they import torch
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
TOKENS = padded_tokens(2)[:1]  # a row without padding


def computed(policy: Policy, params: Params, head: str) -> np.ndarray:
    """What the class returns: the value at the last token, or at all of them."""
    positions, model = jnp.arange(TOKENS.shape[1])[None], policy.bind(params)
    hidden = model(jnp.asarray(TOKENS.numpy()), positions).hidden
    found = np.asarray(our_values(model.scalar_head, hidden))
    return found[:, -1] if head == "sequence" else found


def assert_close(ours: np.ndarray, model: Any) -> None:
    theirs = values(model.float().eval(), TOKENS).numpy()
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
    assert_close(computed(policy, lora.attach(params, learned), head), theirs)
    assert_close(computed(policy, lora.merge(params, learned), head), theirs.merge_and_unload())


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
    assert_close(computed(policy, lora.attach(params, learned), head), theirs)
    export_adapter(tmp_path / "ours", lora, learned, tmp_path / "base")
    assert_same_bits(load_adapter(tmp_path / "ours", lora), learned)
