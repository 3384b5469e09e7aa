"""What quantized weights make of log-probabilities, against a model whose weights are rounded here."""

import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from plain_model import outputs
from runs import QWEN3

from pat_jax.batch_generation.weight_gap import (
    SHORTEST,
    TOKENS_OF_ONE,
    Gap,
    NoRoom,
    Sample,
    measure_gap,
)
from pat_jax.config.rollout import RolloutConfig
from pat_jax.engine.engine import RolloutEngine
from pat_jax.layout.layout import Layout
from pat_jax.models.policy import Params, Policy
from pat_jax.models.weight_formats import WeightFormat

CONFIG = QWEN3
SUMMED = {"query": 1, "key": 1, "value": 1, "out": 3, "gate": 1, "up": 1, "down": 1}
responses = st.lists(st.integers(0, 3 * TOKENS_OF_ONE), max_size=8)
ROLLOUT = RolloutConfig(max_prompt_length=96, max_completion_length=160)


@given(responses, st.integers(0, 4 * TOKENS_OF_ONE))
def test_a_sample_is_the_beginning_of_the_first_responses(lengths: Sequence[int], most: int):
    sample = Sample(most)
    for i, length in enumerate(lengths):
        sample.add([i] * (i + 1), range(length))
    kept = [len(tokens) - prompt for tokens, prompt in sample.sequences]
    assert sample.num_tokens == sum(kept) == min(most, sum(min(n, TOKENS_OF_ONE) for n in lengths))
    for tokens, prompt in sample.sequences:
        output = [*range(len(tokens) - prompt)]
        assert tokens.tolist() == [prompt - 1] * prompt + output


def rounded(name: str, weight: np.ndarray, weights: WeightFormat) -> np.ndarray:
    """The nearest that eight bits and a scale for each output can say."""
    if name not in SUMMED:
        return weight
    inputs = tuple(range(weight.ndim - SUMMED[name], weight.ndim))
    scale = np.abs(weight).max(axis=inputs, keepdims=True) / {"int8": 127, "fp8": 448}[weights]
    if weights == "int8":
        return np.round(weight / scale) * scale
    return (weight / scale).astype(ml_dtypes.float8_e4m3fn).astype(np.float32) * scale


def full_params(policy: Policy) -> Params:
    rng = np.random.default_rng(1)
    return jax.tree.map(
        lambda x: rng.normal(x.ndim == 1, 0.3, x.shape).astype(np.float32), policy.abstract_params
    )


def logprobs(policy: Policy, params: Params, sequence: np.ndarray, prompt: int) -> np.ndarray:
    """From all logits at once, in float64."""
    logits = outputs(policy, params, sequence, longest=512)[prompt - 1 : -1]
    picked = np.take_along_axis(logits, sequence[prompt:, None], axis=1)[:, 0]
    return picked - np.log(np.exp(logits).sum(axis=1))


@pytest.mark.parametrize(
    ("weights", "tp"), [pytest.param("int8", 1, marks=pytest.mark.slow), ("fp8", 2)]
)
def test_the_gap_is_that_of_a_model_with_rounded_weights(weights: WeightFormat, tp: int):
    policy = Policy.from_config(CONFIG)
    full = full_params(policy)
    kept = policy.with_weights(weights)
    engine = RolloutEngine(kept, jax.devices()[:2], ROLLOUT, capacity=2, eos_ids=(0,))
    layout = next(layout for split, layout in engine.layouts.items() if split.tp == tp)
    stored = kept.store(jax.tree.map(jnp.asarray, full), jnp.float32)
    engine.set_weights(jax.device_put(stored, layout.param_shardings(kept)), layout)
    rng, sample = np.random.default_rng(2), Sample(10**6)
    for prompt, response in ((3, 1), (1, 40), (100, SHORTEST), (7, 9), (2, 30)):
        tokens = rng.integers(0, CONFIG.vocab_size, prompt + response).tolist()
        sample.add(tokens[:prompt], tokens[prompt:])
    is_free = []

    def load(asked: Policy, layout: Layout) -> Params:
        is_free.append(engine.params is None)
        return jax.device_put(full, layout.param_shardings(asked))

    gap = measure_gap(engine, sample, load, limit=math.inf)
    by_hand = jax.tree_util.tree_map_with_path(
        lambda path, x: rounded(jax.tree_util.keystr(path).split("'")[-2], x, weights), full
    )
    expected = np.concatenate(
        [
            np.abs(logprobs(policy, full, *one) - logprobs(policy, by_hand, *one))
            for one in sample.sequences
        ]
    )
    assert isinstance(gap, Gap) and is_free == [True]
    assert len(expected) == sample.num_tokens == 1 + 40 + SHORTEST + 9 + 30
    assert gap.mean == pytest.approx(expected.mean(), rel=1e-3) and gap.mean > 1e-3
    assert gap.largest == pytest.approx(expected.max(), rel=1e-3)


def test_full_weights_without_room_are_not_loaded():
    kept = Policy.from_config(CONFIG).with_weights("int8")
    engine = RolloutEngine(kept, jax.devices()[:2], ROLLOUT, capacity=2, eos_ids=(0,))
    found = measure_gap(engine, Sample(9), lambda *_: pytest.fail("loaded"), limit=1000)
    assert isinstance(found, NoRoom) and found.usable == 900
    # Half of the matrices and of the table, the norms whole.
    dim = CONFIG.head_dim
    matrices = CONFIG.embed_dim * (
        CONFIG.padded_vocab_size + 3 * CONFIG.mlp_dim + 2 * dim * (4 + 2)
    )
    assert found.needed == 4 * (matrices // 2 + 3 * CONFIG.embed_dim + 2 * dim)
    assert "more devices would hold them" in str(found)
