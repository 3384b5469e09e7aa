"""Tensors of adapters: under the names that PEFT reads, complete and finite, or refused by name."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from arrays import assert_same_bits

from pat_jax.common.errors import UserError
from pat_jax.models.checkpoints.peft_adapter import (
    ADAPTER_FILE,
    export_adapter,
    load_adapter,
    read_adapter,
)
from pat_jax.models.checkpoints.safetensors_file import read_header, write_file
from pat_jax.models.lora import Lora
from pat_jax.models.policy import Policy
from pat_jax.models.presets import preset

POLICY = Policy.from_config(preset("tiny", vocab_size=61))
LORA = Lora.of(POLICY, rank=4, alpha=8.0, targets=["q_proj", "o_proj"])
QUERY_0 = "model.layers.0.self_attn.q_proj"


@pytest.fixture
def adapter(tmp_path: Path) -> Path:
    export_adapter(tmp_path / "adapter", LORA, LORA.init(3), tmp_path / "base")
    return tmp_path / "adapter"


def stored(adapter: Path) -> dict[str, np.ndarray]:
    return {name: np.array(x.view()) for name, x in read_header(adapter / ADAPTER_FILE).items()}


def restore(adapter: Path, tensors: dict[str, np.ndarray]) -> None:
    shapes = {name: x.shape for name, x in tensors.items()}
    write_file(adapter / ADAPTER_FILE, shapes, np.dtype(np.float32), tensors.values())


def test_the_name_that_peft_gives_an_adapter_in_memory_may_stand_in_its_tensors(adapter: Path):
    tensors = stored(adapter)
    restore(adapter, {x.replace(".weight", ".default.weight"): tensors[x] for x in tensors})
    assert read_adapter(adapter, POLICY) == LORA
    assert_same_bits(load_adapter(adapter, LORA), LORA.init(3))


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
    ("change", "said"),
    [
        (no_tensors, "the file holds no tensor"),
        (more("base_model.model.lm_head.lora_A.weight"), "embed_tokens or lm_head"),
        (more("base_model.model.lm_head.weight"), "whole weights are not implemented"),
        (more("base_model.model.model.embed_tokens.lora_embedding_A"), "embed_tokens or lm_head"),
        (more("base_model.model.model.embed_tokens.lora_A.weight"), "embed_tokens or lm_head"),
        (
            more("base_model.model.model.embed_tokens.token_adapter.trainable_tokens_delta"),
            "added tokens",
        ),
        (more(f"base_model.model.{QUERY_0}.lora_magnitude_vector"), "lora_magnitude_vector"),
        (more(f"base_model.model.{QUERY_0}.lora_A.default.weight"), "with and without '.default'"),
        (more(f"base_model.model.{QUERY_0.replace('q_', 'k_')}.lora_A.weight"), "has tensors of"),
        (renamed(".weight", ".mine.weight"), "lora_A.mine.weight"),
        (renamed("base_model.model.", ""), "tensor 'model.layers.0."),
        (fewer("layers.1."), "'target_modules'"),
        (fewer("layers.1.self_attn.o_proj.lora_B"), "o_proj.lora_B.weight' is missing"),
    ],
)
def test_tensors_that_peft_would_not_read_as_they_are_named_are_refused(
    adapter: Path, change: Callable[[dict[str, np.ndarray]], None], said: str
):
    tensors = stored(adapter)
    change(tensors)
    restore(adapter, tensors)
    with pytest.raises(UserError) as error:
        read_adapter(adapter, POLICY)
    assert said in str(error.value) and "another model" not in str(error.value)


@pytest.mark.parametrize("number", [np.nan, np.inf])
def test_numbers_that_are_not_finite_are_refused(adapter: Path, number: float):
    tensors = stored(adapter)
    next(iter(tensors.values()))[0, 0] = number
    restore(adapter, tensors)
    with pytest.raises(UserError, match=r"lora_A\.weight' has numbers that are not finite"):
        load_adapter(adapter, read_adapter(adapter, POLICY))
