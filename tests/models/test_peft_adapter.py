"""Adapter directories that are not what they should be: one sentence each, before a tensor is read."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import pytest
from arrays import assert_same_bits

from pat_jax.common.errors import UserError
from pat_jax.config.lora import LoraConfig
from pat_jax.models.lora import Lora
from pat_jax.models.peft_adapter import (
    ADAPTER_CONFIG,
    ADAPTER_FILE,
    export_adapter,
    load_adapter,
    read_adapter,
)
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


def cut(adapter: Path) -> None:
    content = (adapter / ADAPTER_FILE).read_bytes()
    (adapter / ADAPTER_FILE).write_bytes(content[:-10])


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda adapter: (adapter / ADAPTER_CONFIG).unlink(), "directory of a PEFT adapter"),
        (lambda adapter: (adapter / ADAPTER_FILE).unlink(), "safe_serialization"),
        (cut, "truncated"),
        (changed(use_dora=True), "'use_dora' is True"),
        (changed(use_rslora=True), "'use_rslora' is True"),
        (changed(bias="all"), "'bias' is 'all'"),
        (changed(rank_pattern={"q_proj": 2}), "'rank_pattern'"),
        (changed(peft_type="IA3"), "'peft_type' is 'IA3'"),
        (changed(r=0), "'r' and 'lora_alpha' are 0 and 8.0"),
        (changed(lora_alpha="8"), "'r' and 'lora_alpha' are 4 and '8'"),
        (changed(r=5), "by the model and rank 5"),
    ],
)
def test_one_that_is_damaged_or_of_another_kind_is_refused(
    adapter: Path, damage: Callable[[Path], None], said: str
):
    damage(adapter)
    with pytest.raises(UserError) as error:
        read_adapter(adapter, POLICY)
    assert said in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize("other", [{"embed_dim": 64}, {"num_layers": 1}, {"num_heads": 4}])
def test_one_of_another_model_is_refused(adapter: Path, other: dict[str, int]):
    with pytest.raises(UserError, match="is of another model than --model") as error:
        read_adapter(adapter, Policy.from_config(replace(TINY, **other)))
    assert "model.layers." in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"rank": 8}, "--lora.rank is 8: expected 4"),
        ({"alpha": 3.0}, "--lora.alpha is 3.0: expected 8.0"),
        ({"targets": ("q_proj",)}, "--lora.targets is 'q_proj': expected"),
    ],
)
def test_options_that_it_contradicts_are_refused(adapter: Path, options: dict[str, Any], said: str):
    with pytest.raises(UserError) as error:
        build_lora(LoraConfig(adapter=str(adapter), **options), POLICY)
    assert said in str(error.value) and "leave the option out" in str(error.value)


def test_options_that_agree_or_are_left_out_take_it(adapter: Path):
    agreeing = {"rank": 4, "alpha": 8.0, "targets": ("o_proj", "q_proj")}
    for options in ({}, agreeing):
        assert build_lora(LoraConfig(adapter=str(adapter), **options), POLICY) == LORA
    assert load_adapter(adapter, LORA)[LORA.modules[0]].a.dtype == jnp.float32
