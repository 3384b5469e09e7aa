"""What a run says of itself is so: parameters as transformers counts them, files that are there."""

from dataclasses import replace
from pathlib import Path

import pytest

from pat_jax.models.hf_tensors import num_parameters
from pat_jax.models.policy import Policy
from pat_jax.models.presets import PRESETS, preset
from pat_jax.run.logging.banner import closing

PUBLISHED = {  # as their model cards say
    "qwen3-8b": 8_190_735_360,
    "llama-3.1-8b": 8_030_261_248,
    "qwen3-30b-a3b": 30_532_122_624,
    "mixtral-8x7b": 46_702_792_704,
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_parameters_are_those_of_the_model_card(name: str):
    assert num_parameters(Policy.from_config(preset(name))) == PUBLISHED[name]


def test_rows_that_pad_the_vocabulary_are_no_parameters():
    for tie in (True, False):
        models = [
            replace(PRESETS["tiny"], vocab_size=101, vocab_multiple=n, tie_embeddings=tie)
            for n in (1, 64)
        ]
        assert len({num_parameters(Policy.from_config(model)) for model in models}) == 1


def test_the_closing_claims_nothing_that_is_not_there(tmp_path: Path):
    def output(export_dir: str = "") -> list[str]:
        seconds = {"compile_s": 61.23, "total_s": 3 * 3600 + 120}
        return closing(tmp_path, export_dir, "policy", **seconds).splitlines()

    (tmp_path / "config.yaml").touch()
    assert output() == [
        "whole run 3 h 2 min, 61.2 s of them compiling",
        f"in {tmp_path}: the configuration",
    ]
    for name in ("metrics.jsonl", "rollout.svg", "completions.jsonl"):
        (tmp_path / name).touch()
    for step in ("9", "10", "11.partial"):
        (tmp_path / "checkpoints" / step).mkdir(parents=True)
    export = tmp_path / "export"
    assert output(str(export))[1:] == [
        f"in {tmp_path}: the configuration, metrics.jsonl, completions.jsonl, rollout.svg, the "
        "checkpoints of step 9 and 10"
    ]
    export.mkdir()
    assert output(str(export))[2:] == [f"in {export}: the policy as a Hugging Face directory"]
