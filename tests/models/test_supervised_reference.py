"""The loss of packed examples and its gradients are those of NumPy, in float64, one example at a time."""

from pathlib import Path

import numpy as np
import pytest
from numpy_reference import Shape, logprobs
from safetensors.numpy import load_file
from supervised_cases import Learned, learned, make_examples, packed

from pat_jax.models.checkpoints.hf_load import check_checkpoint
from pat_jax.rl.data.examples import Example

REFERENCE = Path(__file__).parent / "reference"
CASES = ("qwen3", "qwen3-tied")


def reference_loss(tensors: dict[str, np.ndarray], shape: Shape, examples: list[Example]) -> float:
    values = [logprobs(tensors, shape, one.tokens.tolist())[one.in_loss[1:]] for one in examples]
    return -float(np.concatenate(values).mean())


@pytest.fixture(scope="module", params=CASES)
def case(request, tmp_path_factory) -> tuple[Learned, dict[str, np.ndarray], Shape]:
    directory = REFERENCE / request.param
    config = check_checkpoint(directory)
    shape = Shape(
        config.num_layers,
        config.num_heads,
        config.num_kv_heads,
        config.head_dim,
        config.rope_theta,
        config.norm_eps,
    )
    stored = {}
    for path in directory.glob("model*.safetensors"):
        # NumPy's safetensors reads bfloat16 through ml_dtypes.
        stored |= {name: x.astype(np.float64) for name, x in load_file(path).items()}
    ours = learned(directory, packed(make_examples()), tmp_path_factory.mktemp("work"))
    return ours, stored, shape


def test_the_loss(case):
    ours, tensors, shape = case
    expected = reference_loss(tensors, shape, make_examples())
    assert expected > 1
    assert ours.loss == pytest.approx(expected, rel=1e-5)


def test_the_gradients(case):
    """Of each tensor along itself and along a random direction, by central differences."""
    ours, tensors, shape = case
    rng, examples = np.random.default_rng(1), make_examples()
    assert ours.gradients.keys() == tensors.keys()
    for name, gradient in ours.gradients.items():
        size = float(np.linalg.norm(gradient))
        assert size > 1e-3, name
        for direction in (gradient.astype(np.float64), rng.normal(size=gradient.shape)):
            direction /= np.linalg.norm(direction)
            ends = [
                reference_loss({**tensors, name: tensors[name] + eps * direction}, shape, examples)
                for eps in (1e-5, -1e-5)
            ]
            slope = (ends[0] - ends[1]) / 2e-5
            assert (gradient * direction).sum() == pytest.approx(slope, abs=1e-4 * size), name
