"""Whole texts, packed: each gets the score that transformers gives it alone."""

from functools import cache
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

from pat_jax.layout.chain import layout_chain
from pat_jax.layout.mesh import factored_mesh, padded_for
from pat_jax.models.checkpoints.hf_load import check_checkpoint, load_params
from pat_jax.models.policy import Policy
from pat_jax.rl.algorithm.predict import Predictor
from pat_jax.rl.batches.packing import shapes
from pat_jax.training.passes import model_functions
from pat_jax.training.reader import Reader, TextScorer
from pat_jax.training.trainable_params import TrainableParams

REFERENCE = Path(__file__).parent.parent / "models" / "reference"
PAD = 60  # of the recorded tokens


@cache
def recorded(case: str) -> tuple[list[np.ndarray], np.ndarray]:
    """Texts, and what transformers predicts at the last token of each."""
    found = load_file(REFERENCE / case / "expected.safetensors")
    texts = [row[row != PAD].astype(np.int32) for row in found["tokens"]]
    values = found["values"]
    if values.ndim > 1:
        values = np.array([row[len(text) - 1] for row, text in zip(values, texts, strict=True)])
    return texts, values


@cache
def scorer(case: str, num_devices: int, budget: int) -> TextScorer:
    devices = jax.devices()[:num_devices]
    policy = Policy.from_config(padded_for(devices, check_checkpoint(REFERENCE / case)))
    layout = next(iter(layout_chain(factored_mesh(devices), policy.config)[0].values()))
    held = TrainableParams(policy, layout)
    functions = model_functions(policy, layout, jnp.float32, remat="none")
    micro_shapes = shapes((32, 64), budget, layout.split.dp)
    predictor = Predictor(functions, policy.config.vocab_size)
    reader = Reader("score", held, predictor, micro_shapes)
    reader.params = load_params(REFERENCE / case, policy, held.shardings, jnp.float32)
    return TextScorer(reader, micro_shapes)


@pytest.mark.parametrize(
    ("case", "num_devices"),
    [("llama-sequence", 1), ("qwen2-sequence", 2), ("qwen3-sequence", 8), ("qwen3-token", 2)],
)
def test_packed_texts_have_the_scores_of_transformers(case, num_devices):
    texts, values = recorded(case)
    assert len(set(map(len, texts))) > 1
    score = scorer(case, num_devices, 128)
    tolerance = {"atol": 1e-5 * np.abs(values).max(), "rtol": 0}
    order = [0, 1, 1, 0, 0, 1, 0]  # several to a row, and several micro-batches
    found = score([texts[i] for i in order])
    assert found.dtype == np.float32
    np.testing.assert_allclose(found, values[order], **tolerance)
    alone = np.concatenate([score([texts[i]]) for i in order])
    np.testing.assert_allclose(alone, found, **tolerance)


def test_a_text_may_fill_a_row_to_its_end():
    texts, _ = recorded("llama-sequence")
    text = np.resize(texts[0], 64)
    score = scorer("llama-sequence", 1, 128)
    whole, shorter = score([text, text[:63]])
    assert whole == pytest.approx(score([text])[0], abs=1e-5) and whole != shorter
    with pytest.raises(ValueError, match="65"):
        score([np.resize(text, 65)])
