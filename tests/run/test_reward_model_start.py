"""What training of a reward model begins with."""

from dataclasses import replace
from pathlib import Path

import pytest
from runs import QWEN3, write_checkpoint

from pat_jax.common.errors import UserError
from pat_jax.run.sft.inputs import shape_of_model


def test_a_reward_model_goes_on_from_a_reward_model(tmp_path: Path):
    """It has its head already. Fine-tuning, which generates text, refuses it."""
    judge = replace(QWEN3, head="scalar", tie_embeddings=False)
    folder = str(write_checkpoint(tmp_path / "judge", judge))
    assert shape_of_model(folder, "scalar").head == "scalar"
    with pytest.raises(UserError, match="judge"):
        shape_of_model(folder)


def test_a_language_model_gets_a_new_head(tmp_path: Path):
    folder = str(write_checkpoint(tmp_path / "policy"))
    assert shape_of_model(folder, "scalar") == replace(shape_of_model(folder), head="scalar")
