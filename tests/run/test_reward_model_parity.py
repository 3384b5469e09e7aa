"""Rewards of a model are those of transformers, by its own template (needs the `parity` extra)."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from runs import QWEN3, TINY, reward_models, write_checkpoint

from pat_jax.config.command_line import parse
from pat_jax.run.roles.reward_models import load_reward_models
from pat_jax.run.scoring import open_scorer

torch = pytest.importorskip("torch", reason="needs the `parity` extra")

from transformers import (  # noqa: E402 - it imports torch
    AutoModelForSequenceClassification,
    AutoTokenizer,
)

FAMILIES = {
    "qwen3": QWEN3,
    "qwen2": replace(QWEN3, architecture="qwen2", qk_norm=False, attention_bias=True),
    "llama": replace(QWEN3, architecture="llama", qk_norm=False),
}
PROMPTS = ["What is 2 + 2?", "What is 2 + 2?", "Name a colour.", "Be brief: who wrote Faust?"]
ANSWERS = ["4", "It is four, as two and two make four. " * 3, "", "Goethe"]


def theirs(folder: Path) -> list[float]:
    model = AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    scores = []
    for prompt, answer in zip(PROMPTS, ANSWERS, strict=True):
        chat = [{"role": "user", "content": prompt}, {"role": "assistant", "content": answer}]
        tokens = tokenizer.apply_chat_template(chat, return_tensors="pt", return_dict=False)
        with torch.no_grad():
            scores.append(float(model.eval()(input_ids=tokens).logits[0, 0]))
    return scores


@pytest.mark.parametrize("family", FAMILIES)
def test_scores_are_those_of_transformers(tmp_path: Path, family: str):
    shape = replace(FAMILIES[family], head="scalar", tie_embeddings=False)
    folder = write_checkpoint(tmp_path / "judge", shape)
    config = parse([*TINY, "--reward", f"model:{folder}"])
    config = replace(config, rollout=replace(config.rollout, max_prompt_length=96))
    models = reward_models(config)
    load_reward_models(models)
    with open_scorer(config.reward, config.reward_limits, models) as scorer:
        ours = scorer.score(PROMPTS, ANSWERS, {})
    expected = theirs(folder)
    assert np.ptp(expected) > 0.1
    np.testing.assert_allclose(ours, expected, atol=1e-5, rtol=0)
