"""Adapter directories, and tensors that are not what they should be: one sentence each."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from arrays import assert_same_bits

from pat_jax.common.errors import UserError
from pat_jax.config.lora import LoraConfig
from pat_jax.models.checkpoints.peft_adapter import (
    ADAPTER_FILE,
    export_adapter,
    load_adapter,
    read_adapter,
)
from pat_jax.models.checkpoints.peft_config import ADAPTER_CONFIG
from pat_jax.models.checkpoints.safetensors_file import read_header, write_file
from pat_jax.models.lora import Lora
from pat_jax.models.policy import Policy
from pat_jax.models.presets import preset
from pat_jax.training.build import build_lora

TINY = preset("tiny", vocab_size=61)
POLICY = Policy.from_config(TINY)
LORA = Lora.of(POLICY, rank=4, alpha=8.0, targets=["q_proj", "o_proj"])


@pytest.fixture
def adapter(tmp_path: Path) -> Path:
    export_adapter(tmp_path / "adapter", LORA, LORA.init(3), tmp_path / "base")
    return tmp_path / "adapter"


def test_what_was_written_is_read(adapter: Path):
    assert read_adapter(adapter, POLICY) == LORA
    assert_same_bits(load_adapter(adapter, LORA), LORA.init(3))


def changed(**fields: Any) -> Callable[[Path], None]:
    def change(adapter: Path) -> None:
        path = adapter / ADAPTER_CONFIG
        path.write_text(json.dumps(json.loads(path.read_text()) | fields))

    return change


def refused(adapter: Path, policy: Policy, words: str) -> str:
    """The one sentence by which an adapter is refused."""
    with pytest.raises(UserError) as error:
        read_adapter(adapter, policy)
    message = str(error.value)
    assert words in message and "\n" not in message
    return message


def cut(adapter: Path) -> None:
    content = (adapter / ADAPTER_FILE).read_bytes()
    (adapter / ADAPTER_FILE).write_bytes(content[:-10])


# Fields of PEFT that change how an adapter is applied, and ways to begin one that change its base.
VARIANTS = (
    ("alora_invocation_tokens", [5, 9]),
    ("modules_to_save", ["lm_head"]),
    ("layer_replication", [[0, 2], [1, 2]]),
    ("alpha_pattern", {"^model.layers.0": 4}),
    ("kasa_config", {"beta": 1e-4}),
    ("use_qalora", True),
    ("lora_bias", True),
    ("a_variant_of_next_year", True),
    ("a_variant_of_next_year", {"rho": 2.0}),
)
BASE_CHANGED = ("pissa_niter_16", "OLoRA", "loftq", "ours", 1)


@pytest.mark.parametrize(
    ("damage", "generated"),
    [
        (lambda adapter: (adapter / ADAPTER_CONFIG).unlink(), "directory of a PEFT adapter"),
        (lambda adapter: (adapter / ADAPTER_FILE).unlink(), "safe_serialization"),
        (cut, "truncated"),
        (changed(use_dora=True), "'use_dora' is True"),
        (changed(use_rslora=True), "'use_rslora' is True"),
        (changed(bias="all"), "'bias' is 'all'"),
        (changed(rank_pattern={"q_proj": 2}), "'rank_pattern'"),
        (changed(peft_type="IA3"), "'peft_type' is 'IA3'"),
        (changed(r=0), "'r' is 0"),
        (changed(r=10**29), f"by the model and rank {10**29}"),
        (changed(lora_alpha="8"), "'lora_alpha' is '8'"),
        (changed(lora_alpha=1e29), "'lora_alpha' is 1e+29"),
        (changed(lora_alpha=-8), "'lora_alpha' is -8"),
        (changed(r=5), "by the model and rank 5"),
        (changed(peft_type=None), "'peft_type' is None"),
        *((changed(**{name: value}), f"'{name}' is {value!r}") for name, value in VARIANTS),
        *((changed(init_lora_weights=x), f"'init_lora_weights' is {x!r}") for x in BASE_CHANGED),
    ],
)
def test_one_that_is_damaged_or_of_another_kind_is_refused(adapter, damage, generated):
    damage(adapter)
    refused(adapter, POLICY, generated)


MOE = Policy.from_config(preset("tiny-moe", vocab_size=61))
OF_EXPERTS = ["gate_up_proj", "down_proj", "gate.weight"]


def of_experts(folder: Path, *targets: str, doubles_gate_up: bool = False) -> Lora:
    """Writes an adapter whose numbers are all others."""
    lora = Lora.of(MOE, rank=4, alpha=8.0, targets=targets or OF_EXPERTS)
    lora = replace(lora, doubles_gate_up=doubles_gate_up)
    export_adapter(folder / "moe", lora, numbered(lora), folder / "base")
    return lora


def numbered(lora: Lora) -> Any:
    rng = np.random.default_rng(7)
    return jax.tree.map(
        lambda x: jnp.asarray(rng.normal(size=x.shape), jnp.float32), lora.abstract_params
    )


@pytest.mark.parametrize("name", ["gate_up_proj", "down_proj"])
def test_of_one_stack_alone_the_tensors_are_those_of_the_experts(tmp_path: Path, name: str):
    """PEFT's configuration alone says which."""
    lora = of_experts(tmp_path, name)
    assert all(".mlp.experts.lora_" in tensor for tensor in stored(tmp_path / "moe"))
    changed(target_parameters=[name])(tmp_path / "moe")
    assert read_adapter(tmp_path / "moe", MOE) == lora
    assert_same_bits(load_adapter(tmp_path / "moe", lora), numbered(lora))


FIRST = "base_model.model.model.layers.0"


@pytest.mark.parametrize(
    ("fields", "generated"),
    [
        ({"target_parameters": None}, "mlp.experts', expected those of attention, and of experts and"),
        ({"target_parameters": ["down_proj", "gate.weight"]}, "names them in target_parameters"),
        ({"target_parameters": "down_proj"}, "expected a list of parameters' names"),
        ({"rank_pattern": {"gate_up_proj": 8}}, "'rank_pattern' is"),
        ({"rank_pattern": {r".*\.gate_up_proj": 8}}, "'rank_pattern' is"),
        (
            {"rank_pattern": {r".*\.gate_up_proj": 8}, "alpha_pattern": {r".*\.gate_up_proj": 16}},
            "of another model than --model: 'base_model.model.model.layers.0.mlp.experts.base_layer.lora_A",
        ),
    ],
)  # fmt: skip
def test_fields_of_experts_that_the_tensors_contradict_are_refused(tmp_path, fields, generated):
    of_experts(tmp_path)
    changed(**fields)(tmp_path / "moe")
    refused(tmp_path / "moe", MOE, generated)


@pytest.mark.parametrize(
    "module", ["mlp.experts.3.down_proj", "block_sparse_moe.experts.0.w1", "mlp.up_proj"]
)
def test_tensors_beside_experts_are_refused_in_their_own_words(tmp_path: Path, module: str):
    """As PEFT writes them with transformers 4, or of layers that have no adapter."""
    of_experts(tmp_path, "q_proj")
    tensors = stored(tmp_path / "moe")
    tensors |= {f"{FIRST}.{module}.lora_{x}.weight": np.ones((4, 4), np.float32) for x in "AB"}
    restore(tmp_path / "moe", tensors)
    message = refused(tmp_path / "moe", MOE, "no MLP beside experts has one")
    assert f"it has an adapter of 'model.layers.0.{module}'" in message
    assert ". " not in message.removeprefix(str(tmp_path))


def test_one_of_experts_is_of_another_model_than_one_without(tmp_path: Path):
    of_experts(tmp_path)
    words = "is of another model than --model: it has an adapter of"
    refused(tmp_path / "moe", POLICY, words)


BEGUN = (True, False, None, "gaussian", "eva", "orthogonal", "mica")
NO_EFFECT = (
    *({"init_lora_weights": way} for way in BEGUN),
    {"corda_config": {"corda_method": "kpm"}, "eva_config": {"rho": 2.0}, "loftq_config": {"b": 4}},
    {"qalora_group_size": 32, "megatron_core": "megatron.core", "lora_dropout": 0.1},
    {"alora_invocation_tokens": None, "rank_pattern": None, "layers_to_transform": []},
    {"task_type": None, "ensure_weight_tying": True, "runtime_config": {"ephemeral": True}},
    {"a_variant_of_next_year": None, "its_group_size": 16, "its_name": "default"},
)


@pytest.mark.parametrize("fields", NO_EFFECT)
def test_fields_without_effect_on_a_trained_adapter_are_let_through(adapter, fields):
    changed(**fields)(adapter)
    assert read_adapter(adapter, POLICY) == LORA


def test_what_peft_fills_in_where_a_field_is_missing(tmp_path: Path):
    plain = Lora.of(POLICY, rank=8, alpha=8.0, targets=["q_proj", "v_proj"])
    export_adapter(tmp_path / "adapter", plain, plain.init(0), tmp_path)
    (tmp_path / "adapter" / ADAPTER_CONFIG).write_text('{"peft_type": "LORA"}')
    assert read_adapter(tmp_path / "adapter", POLICY) == plain


QUERY_0 = "model.layers.0.self_attn.q_proj"


@pytest.mark.parametrize("targets", ["all-linear", ["v_proj"], r".*\.0\..*q_proj", "(a+)+b", None])
def test_which_layers_are_adapted_the_tensors_tell(adapter: Path, targets: Any):
    fields = {"exclude_modules": ["o_proj"], "layers_to_transform": [1], "layers_pattern": "h"}
    changed(target_modules=targets, **fields)(adapter)
    assert read_adapter(adapter, POLICY) == LORA


@pytest.mark.parametrize("other", [{"embed_dim": 64}, {"num_layers": 1}, {"num_heads": 4}])
def test_one_of_another_model_is_refused(adapter: Path, other: dict[str, int]):
    policy = Policy.from_config(replace(TINY, **other))
    assert "model.layers." in refused(adapter, policy, "is of another model than --model")


@pytest.mark.parametrize(
    ("options", "generated"),
    [
        ({"rank": 8}, "--lora.rank is 8: expected 4"),
        ({"alpha": 3.0}, "--lora.alpha is 3.0: expected 8.0"),
        ({"targets": ("q_proj",)}, "--lora.targets is 'q_proj': expected"),
    ],
)
def test_options_that_it_contradicts_are_refused(adapter, options, generated):
    with pytest.raises(UserError) as error:
        build_lora(LoraConfig(adapter=str(adapter), **options), POLICY)
    assert generated in str(error.value) and "leave the option out" in str(error.value)


def test_options_that_agree_or_are_left_out_take_it(adapter: Path):
    agreeing = {"rank": 4, "alpha": 8.0, "targets": ("o_proj", "q_proj")}
    for options in ({}, agreeing):
        assert build_lora(LoraConfig(adapter=str(adapter), **options), POLICY) == LORA
    assert load_adapter(adapter, LORA)[LORA.modules[0]].a.dtype == jnp.float32


def stored(adapter: Path) -> dict[str, np.ndarray]:
    return {name: np.array(x.view()) for name, x in read_header(adapter / ADAPTER_FILE).items()}


def restore(adapter: Path, tensors: dict[str, np.ndarray]) -> None:
    shapes = {name: x.shape for name, x in tensors.items()}
    write_file(adapter / ADAPTER_FILE, shapes, np.dtype(np.float32), tensors.values())


PREFIX = "base_model.model.model."
NAMES = [(".weight", ".default.weight")]  # an adapter in PEFT's memory has a name
NAMES += [(PREFIX, other) for other in ("model.", "", "base_model.model.", f"module.{PREFIX}")]


@pytest.mark.parametrize(("part", "other"), NAMES)
def test_tensors_may_have_other_names(adapter: Path, part: str, other: str):
    tensors = stored(adapter)
    restore(adapter, {x.replace(part, other): tensors[x] for x in tensors})
    assert read_adapter(adapter, POLICY) == LORA
    assert_same_bits(load_adapter(adapter, LORA), LORA.init(3))


@pytest.mark.parametrize("head_bias", [False, True])
@pytest.mark.parametrize(
    "head", ["score.", "base_model.model.score.", "base_model.model.score.modules_to_save.default."]
)
def test_so_may_a_head_that_is_saved_as_a_whole(tmp_path: Path, head: str, head_bias: bool):
    policy = Policy.from_config(replace(TINY, head="scalar", head_bias=head_bias))
    lora = Lora.of(policy, rank=4, alpha=8.0, targets=["q_proj"])
    export_adapter(tmp_path / "adapter", lora, numbered(lora), tmp_path / "base")
    tensors = stored(tmp_path / "adapter")
    prefix = "base_model.model." if head.startswith("base") else ""
    names = {x: x.replace("base_model.model.score.", head) for x in tensors}
    renamed = {y.replace("base_model.model.model.", f"{prefix}model."): x for x, y in names.items()}
    assert renamed.keys() != tensors.keys() or head == "base_model.model.score."
    restore(tmp_path / "adapter", {name: tensors[x] for name, x in renamed.items()})
    assert read_adapter(tmp_path / "adapter", policy) == lora
    assert_same_bits(load_adapter(tmp_path / "adapter", lora), numbered(lora))


def no_tensors(tensors: dict[str, np.ndarray]) -> None:
    tensors.clear()


def more(name: str) -> Callable[[dict[str, np.ndarray]], None]:
    return lambda tensors: tensors.update({name: np.zeros((4, 32), np.float32)})


def fewer(part: str) -> Callable[[dict[str, np.ndarray]], None]:
    def remove(tensors: dict[str, np.ndarray]) -> None:
        for name in [x for x in tensors if part in x]:
            del tensors[name]

    return remove


def renamed(part: str, other: str) -> Callable[[dict[str, np.ndarray]], None]:
    def rename(tensors: dict[str, np.ndarray]) -> None:
        for name in list(tensors):
            tensors[name.replace(part, other)] = tensors.pop(name)

    return rename


@pytest.mark.parametrize(
    ("change", "generated"),
    [
        (no_tensors, "the file holds no tensor"),
        (more("base_model.model.lm_head.lora_A.weight"), "embed_tokens or lm_head"),
        (more("base_model.model.lm_head.weight"), "whole weights are not implemented"),
        (more("base_model.model.model.embed_tokens.lora_embedding_A"), "embed_tokens or lm_head"),
        (more("base_model.model.model.embed_tokens.lora_A.weight"), "embed_tokens or lm_head"),
        (more("base_model.model.model.embed_tokens.trainable_tokens_delta"), "added tokens"),
        (more(f"base_model.model.{QUERY_0}.lora_magnitude_vector"), "lora_magnitude_vector"),
        (more(f"base_model.model.{QUERY_0}.lora_A.default.weight"), "with and without '.default'"),
        (
            more(f"base_model.model.{QUERY_0.replace('q_', 'k_')}.lora_A.weight"),
            "lora_B.weight' is missing",
        ),
        (renamed(".weight", ".mine.weight"), "lora_A.mine.weight"),
        (more("base_model.model.v_head.summary.weight"), "'base_model.model.v_head.summary.weight"),
        (more(f"{QUERY_0}.lora_A.weight"), "with and without '.default' or 'base_model.model.'"),
        (fewer("layers.1.self_attn.o_proj.lora_B"), "o_proj.lora_B.weight' is missing"),
    ],
)
def test_tensors_that_peft_would_not_read_as_they_are_named_are_refused(adapter, change, generated):
    tensors = stored(adapter)
    change(tensors)
    restore(adapter, tensors)
    assert "another model" not in refused(adapter, POLICY, generated)


@pytest.mark.parametrize("number", [np.nan, np.inf])
def test_numbers_that_are_not_finite_are_refused(adapter: Path, number: float):
    tensors = stored(adapter)
    next(iter(tensors.values()))[0, 0] = number
    restore(adapter, tensors)
    with pytest.raises(UserError, match=r"lora_A\.weight' has numbers that are not finite"):
        load_adapter(adapter, read_adapter(adapter, POLICY))
