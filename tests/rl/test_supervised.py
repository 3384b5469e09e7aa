"""Examples in packed rows: each token in one place, and of those in the loss each weighs the same."""

from itertools import pairwise

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pat_jax.rl.algorithm.supervised import CrossEntropy, num_learned, to_example_batch
from pat_jax.rl.batches.packing import shapes
from pat_jax.rl.data.examples import Example

SHAPES = shapes((8, 16), budget=32, row_multiple=1)


@st.composite
def examples(draw) -> list[Example]:
    found = []
    for length in draw(st.lists(st.integers(2, 16), min_size=1, max_size=12)):
        in_loss = np.array(
            [False, *draw(st.lists(st.booleans(), min_size=length - 1, max_size=length - 1))]
        )
        in_loss[-1] |= not in_loss.any()
        tokens = np.array(
            draw(st.lists(st.integers(0, 9), min_size=length, max_size=length)), np.int32
        )
        found.append(Example(tokens, in_loss))
    return found


@given(examples())
def test_a_batch_has_each_example_once_and_its_learned_targets_alone(given_examples):
    batch = to_example_batch(given_examples, SHAPES)
    (micro_batches,) = batch.mini_batches
    weight, found = 1 / num_learned(given_examples), []
    for micro in micro_batches:
        assert micro.tokens.shape in SHAPES and micro.columns == {}
        np.testing.assert_array_equal(micro.weights > 0, micro.responses > 0)
        assert set(np.unique(micro.weights)) <= {0.0, np.float32(weight)}
        for tokens, positions, weights, responses in zip(
            micro.tokens, micro.positions, micro.weights, micro.responses, strict=True
        ):
            starts = [*np.flatnonzero(positions == 0), len(positions)]
            numbers = []
            for start, stop in pairwise(starts):
                found.append((tokens[start:stop].tolist(), (weights[start:stop] > 0).tolist()))
                numbers += {*responses[start:stop].tolist()} - {0}
            assert len(numbers) == len(set(numbers))  # one for each example, and each its own
    for example in given_examples:
        targets = [*example.in_loss[1:].tolist(), False]
        assert (example.tokens.tolist(), targets) in found
    learned = [one for one in found if any(one[1])]
    assert len(learned) == len(given_examples)
    total = sum(micro.weights.sum() for micro in micro_batches)
    assert total == pytest.approx(1, rel=1e-5)
    slots = sum(micro.tokens.size for micro in micro_batches)
    assert batch.padding_efficiency == sum(map(len, given_examples)) / slots


def test_the_cross_entropy_is_minus_the_mean_log_probability():
    logprobs = -jnp.arange(6.0).reshape(2, 3)
    weights = jnp.array([[0.5, 0.25, 0], [0.25, 0, 0]])
    loss, sums = CrossEntropy()(logprobs, -logprobs, {}, weights)
    assert float(loss) == pytest.approx(0.25 * 1 + 0.25 * 3)
    assert CrossEntropy().summary([jax.device_get(sums)])["entropy"] == pytest.approx(1.0)
