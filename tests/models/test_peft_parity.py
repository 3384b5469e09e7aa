"""Live comparison with PEFT, in both directions (needs the `parity` extra)."""

import dataclasses
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from arrays import assert_same_bits

from pat_jax.common.errors import UserError
from pat_jax.models.checkpoints.peft_adapter import export_adapter, load_adapter, read_adapter
from pat_jax.models.checkpoints.peft_config import KNOWN_FIELDS
from pat_jax.models.checkpoints.peft_tensors import PREFIX, to_stored, wrapper
from pat_jax.models.lora import Lora

torch = pytest.importorskip("torch", reason="needs the `parity` extra")
peft = pytest.importorskip("peft", reason="needs the `parity` extra")

from both_sides import TOKENS, our_logits, ours_of, their_logits  # noqa: E402 - they import torch
from make_reference import build  # noqa: E402
from transformers import AutoModelForCausalLM  # noqa: E402

# PEFT 0.21 asks transformers 5 under its old name.
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated")
CASES = ("llama", "qwen2", "qwen3-tied", "qwen3_moe", "mixtral")
TARGETS = (["all-linear"], ["q_proj", "v_proj"], ["mlp.down_proj", "layers.0.self_attn.o_proj"])


@pytest.fixture(params=CASES)
def base(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    build(request.param).save_pretrained(tmp_path / "base")
    return tmp_path / "base"


@pytest.mark.parametrize("targets", TARGETS, ids=["all", "q-v", "some"])
def test_peft_loads_our_adapter_and_gives_its_logits(base: Path, tmp_path, targets: list[str]):
    policy, params = ours_of(base)
    if policy.config.experts is not None:  # beside which no MLP has an adapter
        targets = [target for target in targets if not target.startswith("mlp")]
    lora, rng = Lora.of(policy, rank=3, alpha=8.0, targets=targets), np.random.default_rng(1)
    learned = jax.tree.map(
        lambda x: jnp.asarray(rng.normal(0, 0.2, x.shape), jnp.float32), lora.abstract_params
    )
    export_adapter(tmp_path / "adapter", lora, learned, base)

    plain = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    before = their_logits(plain)
    theirs = peft.PeftModel.from_pretrained(plain, tmp_path / "adapter")
    found = {
        name
        for name, module in theirs.get_base_model().named_modules()
        if hasattr(module, "lora_A")
    }
    assert found == set(lora.modules)
    expected = their_logits(theirs)
    assert np.abs(expected - before).max() > 0.1
    ours = our_logits(policy, lora.attach(params, learned))
    np.testing.assert_allclose(ours, expected, atol=2e-4, rtol=0)
    merged = their_logits(theirs.merge_and_unload())
    np.testing.assert_allclose(our_logits(policy, lora.merge(params, learned)), merged, atol=2e-4)
    # By the name of its base, which the adapter knows.
    alone = peft.AutoPeftModelForCausalLM.from_pretrained(tmp_path / "adapter", dtype=torch.float32)
    np.testing.assert_allclose(their_logits(alone), expected, atol=1e-5)


def test_every_field_of_peft_is_known():
    assert {field.name for field in dataclasses.fields(peft.LoraConfig)} <= KNOWN_FIELDS


def trained_adapter(base: Path, directory: Path, **fields: Any) -> None:
    """One whose every number has moved since its beginning."""
    torch.manual_seed(0)
    config = peft.LoraConfig(r=4, lora_alpha=7, task_type="CAUSAL_LM", **fields)
    theirs = peft.get_peft_model(AutoModelForCausalLM.from_pretrained(base), config)
    with torch.no_grad():
        for name, x in theirs.named_parameters():
            if "lora_" in name:
                x += 0.2 * torch.randn_like(x)
    theirs.save_pretrained(directory)


MIXTURES = ("qwen3_moe", "mixtral")
OF_EXPERTS = ["experts.gate_up_proj", "experts.down_proj", "gate.weight"]


def assert_close(ours: Any, theirs: np.ndarray) -> None:
    """By the largest number."""
    assert np.abs(theirs).max() > 0
    np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-5 * np.abs(theirs).max())


def loaded(base: Path, adapter: Path, **options: Any) -> torch.nn.Module:
    plain = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    return peft.PeftModel.from_pretrained(plain, adapter, **options)


@pytest.mark.filterwarnings("ignore:.*_pattern keys did not match")
@pytest.mark.parametrize("doubles_gate_up", [False, True])
@pytest.mark.parametrize("name", MIXTURES)
def test_peft_gives_logits_and_gradients_of_our_adapters_of_experts(
    tmp_path: Path, name: str, doubles_gate_up: bool
):
    """Reads them, learns as we do, and writes them as they were."""
    build(name).save_pretrained(base := tmp_path / "base")
    policy, params = ours_of(base)
    lora = Lora.of(policy, rank=3, alpha=8.0, targets=["v_proj", *OF_EXPERTS])
    lora = dataclasses.replace(lora, doubles_gate_up=doubles_gate_up)
    rng = np.random.default_rng(1)
    learned = jax.tree.map(
        lambda x: jnp.asarray(rng.normal(0, 0.2, x.shape), jnp.float32), lora.abstract_params
    )
    export_adapter(tmp_path / "adapter", lora, learned, base)

    theirs = loaded(base, tmp_path / "adapter", is_trainable=True).eval()
    tokens, toward = torch.from_numpy(TOKENS), rng.normal(size=(*TOKENS.shape, 61))
    out = theirs(tokens).logits
    plain = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    assert np.abs(their_logits(plain) - out.detach().numpy()).max() > 0.1
    assert_close(our_logits(policy, lora.attach(params, learned)), out.detach().numpy())
    (out * torch.from_numpy(toward).float()).sum().backward()
    positions = jnp.broadcast_to(jnp.arange(TOKENS.shape[1]), TOKENS.shape)

    @jax.jit
    @jax.grad
    def gradients(adapters: Any) -> Any:
        model = policy.bind(lora.attach(params, adapters))
        hidden = model(jnp.asarray(TOKENS), positions)[0]
        return jnp.sum(model.logits(hidden)[..., :61] * jnp.asarray(toward))

    grads = {name: x.grad.numpy() for name, x in theirs.named_parameters() if "lora_" in name}
    for module, adapter in jax.device_get(gradients(learned)).items():
        stem = PREFIX + wrapper(module, lora.modules)
        for part, ours in zip("AB", to_stored(module, adapter), strict=True):
            assert_close(ours, grads.pop(f"{stem}.lora_{part}.default.weight"))
    assert not grads

    theirs.save_pretrained(tmp_path / "again")
    assert read_adapter(tmp_path / "again", policy) == lora
    assert_same_bits(load_adapter(tmp_path / "again", lora), learned)
    merged = their_logits(theirs.merge_and_unload())
    assert_close(our_logits(policy, lora.merge(params, learned)), merged)


# What PEFT makes adapters of the experts of, and whether that of gate and up has twice the rank.
OF_PEFT = (
    ({"target_modules": ["q_proj", "o_proj"]}, 2, False),
    ({"target_modules": "all-linear"}, 7, True),
    ({"target_modules": [], "target_parameters": ["experts.gate_up_proj"]}, 1, False),
    ({"target_modules": ["k_proj"], "target_parameters": OF_EXPERTS[:2]}, 3, False),
)


@pytest.mark.filterwarnings("ignore:.*_pattern keys did not match")
@pytest.mark.parametrize(("fields", "kinds", "doubles_gate_up"), OF_PEFT, ids=str)
@pytest.mark.parametrize("name", MIXTURES)
def test_adapters_of_a_mixture_that_peft_has_trained_are_read(
    tmp_path: Path, name: str, fields: dict[str, Any], kinds: int, doubles_gate_up: bool
):
    build(name).save_pretrained(base := tmp_path / "base")
    policy, params = ours_of(base)
    trained_adapter(base, tmp_path / "adapter", **fields)
    expected = their_logits(loaded(base, tmp_path / "adapter"))
    lora = read_adapter(tmp_path / "adapter", policy)
    assert (len(lora.kinds), lora.doubles_gate_up) == (kinds, doubles_gate_up)
    learned = load_adapter(tmp_path / "adapter", lora)
    assert_close(our_logits(policy, lora.attach(params, learned)), expected)


CHOICES = (
    {"init_lora_weights": "gaussian"},
    {"init_lora_weights": "orthogonal"},
    {"init_lora_weights": "mica"},
    {"layers_to_transform": [1], "target_modules": ["q_proj", "down_proj"]},
    {"layers_to_transform": 0, "layers_pattern": "layers", "target_modules": ["up_proj"]},
    {"exclude_modules": ["v_proj", "layers.0.mlp.up_proj"], "target_modules": "all-linear"},
    {"target_modules": r".*\.1\.(self_attn|mlp)\.(q|gate)_proj", "exclude_modules": r".*gate_proj"},
    {"target_modules": "^model.*_proj$"},
    {},
)


@pytest.mark.parametrize("fields", CHOICES, ids=str)
def test_adapters_load_in_both_alike(tmp_path: Path, fields: dict[str, Any]):
    build("llama").save_pretrained(tmp_path / "base")
    trained_adapter(tmp_path / "base", tmp_path / "adapter", **fields)
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "base", dtype=torch.float32)
    before = their_logits(plain)
    expected = their_logits(peft.PeftModel.from_pretrained(plain, tmp_path / "adapter"))
    assert np.abs(expected - before).max() > 0.01
    policy, params = ours_of(tmp_path / "base")
    lora = read_adapter(tmp_path / "adapter", policy)
    assert (lora.rank, lora.alpha) == (4, 7.0)
    ours = our_logits(policy, lora.attach(params, load_adapter(tmp_path / "adapter", lora)))
    np.testing.assert_allclose(ours, expected, atol=2e-4, rtol=0)


@pytest.mark.filterwarnings("ignore:.*changes the base weights")
@pytest.mark.parametrize("init", ["pissa", "pissa_niter_4", "olora"])
def test_adapters_that_change_their_base_are_refused_until_peft_has_made_them_plain(tmp_path, init):
    build("llama").save_pretrained(tmp_path / "base")
    policy, params = ours_of(tmp_path / "base")
    torch.manual_seed(0)
    config = peft.LoraConfig(r=4, lora_alpha=7, init_lora_weights=init, task_type="CAUSAL_LM")
    theirs = peft.get_peft_model(AutoModelForCausalLM.from_pretrained(tmp_path / "base"), config)
    theirs.peft_config["default"].init_lora_weights = True
    theirs.save_pretrained(tmp_path / "beginning")
    theirs.peft_config["default"].init_lora_weights = init
    with torch.no_grad():
        for name, x in theirs.named_parameters():
            if "lora_" in name:
                x += 0.2 * torch.randn_like(x)
    expected = their_logits(theirs)
    theirs.save_pretrained(tmp_path / "adapter")
    with pytest.raises(UserError, match=r"'init_lora_weights'.*path_initial_model"):
        read_adapter(tmp_path / "adapter", policy)
    theirs.save_pretrained(
        tmp_path / "plain", path_initial_model_for_weight_conversion=str(tmp_path / "beginning")
    )
    lora = read_adapter(tmp_path / "plain", policy)
    ours = our_logits(policy, lora.attach(params, load_adapter(tmp_path / "plain", lora)))
    np.testing.assert_allclose(ours, expected, atol=2e-4, rtol=0)
