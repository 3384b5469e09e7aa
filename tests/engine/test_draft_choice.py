"""Which drafts `--speculation.source` comes to, and what is said of a source that cannot draft."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from runs import QWEN3, write_checkpoint

from pat_jax.common.errors import UserError
from pat_jax.config.speculation import SpeculationConfig
from pat_jax.engine.device.draft.generated import EarlyExit
from pat_jax.engine.sizing.draft_choice import DraftChoice, shape_of, wanted_drafts
from pat_jax.models.config import ModelConfig
from pat_jax.models.policy import Policy


def chosen(source: str, model: ModelConfig = QWEN3) -> DraftChoice:
    config = SpeculationConfig(source=source)
    return wanted_drafts(config, Policy.from_config(model), "cpu", 32)


def test_a_layer_before_the_last_drafts():
    choice = chosen("early_exit:1", replace(QWEN3, num_layers=2))
    assert isinstance(choice.drafter, EarlyExit) and choice.drafter.drafts.exit_layer == 1
    assert "first 1 of 2 layers" in choice.reason


@pytest.mark.parametrize(
    ("source", "num_layers", "words"),
    [
        ("early_exit:2", 2, "early_exit:LAYER with a layer from 1 to 1, because"),
        ("early_exit:40", 2, "early_exit:LAYER with a layer from 1 to 1, because"),
        ("early_exit:1", 1, "because the model has only one layer"),
        ("model:nothing", 2, "is 'model:nothing': expected model:DIR with the folder of a"),
        *((x, 2, "suffix, model:DIR or early_exit:LAYER") for x in ("early_exit:0", "model:", "")),
    ],
)
def test_sources_that_cannot_draft(source: str, num_layers: int, words: str):
    with pytest.raises(UserError, match=words) as refused:
        chosen(source, replace(QWEN3, num_layers=num_layers))
    assert "from 1 to 0" not in str(refused.value)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({}, ""),
        ({"vocab_size": 64}, "a draft model with the policy's 300 tokens, but this one has 64"),
        (
            {"max_position": 16},
            "context of 32 tokens, the longest prompt and response together, but this",
        ),
    ],
)
def test_models_that_may_draft(tmp_path: Path, change: dict[str, Any], words: str):
    folder = write_checkpoint(tmp_path / "draft", replace(QWEN3, **change))
    if words:
        with pytest.raises(UserError, match=words):
            chosen(f"model:{folder}")
        return
    choice = chosen(f"model:{folder}")
    assert choice.drafter.policy is not None and choice.drafter.policy.config.num_layers == 1
    assert f"proposed by {folder} (1 layers)" in choice.reason


def test_a_shape_that_is_not_built_in():
    words = r"expected model: and the folder of a checkpoint, or a built-in shape \(demo, tiny"
    with pytest.raises(UserError, match=words) as refused:
        shape_of("tini")
    assert "::" not in str(refused.value) and "is 'model:tini'" in str(refused.value)
