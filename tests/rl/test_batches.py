"""Every response token is in a mini-batch once, in its place and with its weight."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import count, pairwise
from typing import Any

import numpy as np
import pytest
from chex import assert_trees_all_equal
from hypothesis import given
from hypothesis import strategies as st

from pat_jax.rl.algorithm.supervised import num_learned, to_example_batch
from pat_jax.rl.batches.batches import to_train_batch
from pat_jax.rl.batches.packing import shapes
from pat_jax.rl.batches.train_batch import COLUMNS, MicroBatch, TrainBatch
from pat_jax.rl.batches.types import FinishReason, Prompt, Rollout, RolloutGroup
from pat_jax.rl.data.examples import Example

BUCKETS = (4, 8, 16)
LONGEST = 11  # tokens that a response may have


def make_groups(
    lengths: Sequence[tuple[int, Sequence[tuple[int, FinishReason]]]],
) -> tuple[list[RolloutGroup], np.ndarray]:
    """Groups of (prompt length, [(response length, finish)]); no token occurs twice anywhere."""
    token = count(1)
    groups = []
    for number, (prompt_length, responses) in enumerate(lengths):
        prompt = Prompt(number, tuple(next(token) for _ in range(prompt_length)), "", {})
        rollouts = []
        for sample, (length, finish) in enumerate(responses):
            tokens = np.array([next(token) for _ in range(length)], np.int32)
            logprobs = -tokens.astype(np.float32) / 7
            rollouts.append(Rollout(prompt, sample, tokens, logprobs, finish, 2 * logprobs))
        groups.append(RolloutGroup(prompt, rollouts))
    num_samples = len(lengths[0][1])
    advantages = np.arange(1, 1 + len(groups) * num_samples, dtype=np.float32)
    return groups, advantages.reshape(len(groups), num_samples)


def batch_of(groups: list[RolloutGroup], advantages: np.ndarray, **options: Any) -> TrainBatch:
    usual = {"mini_batch_size": 1, "micro_shapes": [(2, 8)]}
    usual |= {"aggregation": "token", "truncated": "score"}
    return to_train_batch(groups, advantages, **usual | options)


RESPONSES = st.tuples(st.integers(1, 10), st.sampled_from(FinishReason))
LENGTHS = st.integers(1, 3).flatmap(
    lambda num_samples: st.lists(
        st.tuples(
            st.integers(1, 6), st.lists(RESPONSES, min_size=num_samples, max_size=num_samples)
        ),
        min_size=1,
        max_size=6,
    )
)


def occurrences(micro_batches: Sequence[MicroBatch]) -> dict[int, tuple[float, ...]]:
    """Target token -> (weight, advantage, log-probability unfiltered and filtered), each seen once."""
    found = {}
    for micro in micro_batches:
        targets = np.roll(micro.tokens, -1, axis=1)
        for row, t in zip(*np.nonzero(micro.mask), strict=True):
            token = int(targets[row, t])
            assert token not in found
            found[token] = (
                float(micro.weights[row, t]),
                *(float(micro.columns[name][row, t]) for name in COLUMNS),
            )
    return found


def expected_occurrences(groups, advantages, aggregation, truncated):
    responses = [
        (rollout, float(advantage), truncated == "score" or rollout.finish == "stop")
        for group, row in zip(groups, advantages, strict=True)
        for rollout, advantage in zip(group.rollouts, row, strict=True)
    ]
    counted = [rollout for rollout, _, is_counted in responses if is_counted]
    num_tokens = sum(len(rollout.tokens) for rollout in counted) or 1
    expected = {}
    for rollout, advantage, is_counted in responses:
        weight = 0.0
        if is_counted:
            per_sequence = 1 / (len(counted) * len(rollout.tokens))
            constant = 1 / (len(responses) * LONGEST)
            weight = {"token": 1 / num_tokens, "sequence": per_sequence, "constant": constant}[
                aggregation
            ]
        for token, logprob in zip(rollout.tokens, rollout.logprobs, strict=True):
            expected[int(token)] = (weight, advantage, 2 * float(logprob), float(logprob))
    return expected


@given(
    LENGTHS,
    st.integers(1, 4),
    st.integers(1, 80),
    st.sampled_from([1, 2, 4]),
    st.sampled_from(["token", "sequence", "constant"]),
    st.sampled_from(["mask", "score"]),
)
def test_every_response_token_is_there_once_with_its_weight(
    lengths, mini_batch_size, budget, row_multiple, aggregation, truncated
):
    groups, advantages = make_groups(lengths)
    allowed = shapes(BUCKETS, budget, row_multiple)
    batch = batch_of(
        groups,
        advantages,
        mini_batch_size=mini_batch_size,
        micro_shapes=allowed,
        aggregation=aggregation,
        truncated=truncated,
        max_completion_length=LONGEST,
    )
    assert len(batch.mini_batches) == -(-len(groups) // mini_batch_size)
    for i, micro_batches in enumerate(batch.mini_batches):
        chosen = slice(i * mini_batch_size, (i + 1) * mini_batch_size)
        expected = expected_occurrences(groups[chosen], advantages[chosen], aggregation, truncated)
        found = occurrences(micro_batches)
        assert found.keys() == expected.keys()
        for token, values in found.items():
            np.testing.assert_allclose(values, expected[token], rtol=1e-6)
        total = sum(float(micro.weights.sum(dtype=np.float64)) for micro in micro_batches)
        wanted = sum(weight for weight, *_ in expected.values())
        np.testing.assert_allclose(total, wanted, rtol=1e-6)
        assert aggregation == "constant" or wanted == 0 or wanted == pytest.approx(1)
    check_shapes_and_padding(batch, groups, allowed)
    check_places(batch, groups)


@given(LENGTHS, st.sets(st.integers(0, 17)), st.sampled_from(["token", "sequence"]))
def test_a_response_without_an_advantage_is_left_out_as_a_masked_one_is(
    lengths, missing, aggregation
):
    stopped = [(n, [(m, FinishReason.STOP) for m, _ in responses]) for n, responses in lengths]
    groups, advantages = make_groups(stopped)
    missing = [i for i in missing if i < advantages.size]
    masked = [RolloutGroup(group.prompt, list(group.rollouts)) for group in groups]
    for row, sample in (divmod(i, advantages.shape[1]) for i in missing):
        cut: Any = masked[row].rollouts
        cut[sample] = replace(cut[sample], finish=FinishReason.LENGTH)
    reference = advantages.copy()
    advantages.flat[missing], reference.flat[missing] = np.nan, 0.0
    options = {"mini_batch_size": 2, "micro_shapes": shapes(BUCKETS, 40, 2)}
    options |= {"aggregation": aggregation}
    assert_trees_all_equal(
        batch_of(groups, advantages, **options).mini_batches,
        batch_of(masked, reference, truncated="mask", **options).mini_batches,
    )


def check_shapes_and_padding(batch: TrainBatch, groups: list[RolloutGroup], allowed) -> None:
    every = [micro for micro_batches in batch.mini_batches for micro in micro_batches]
    slots = sum(rows * length for rows, length in (micro.tokens.shape for micro in every))
    sizes = [len(g.prompt.tokens) + len(r.tokens) for g in groups for r in g.rollouts]
    assert batch.padding_efficiency == pytest.approx(sum(sizes) / slots)
    assert sum(int((micro.tokens > 0).sum()) for micro in every) == sum(sizes)
    for micro in every:
        assert micro.tokens.shape in allowed
        for per_token in (micro.mask, micro.weights, *micro.columns.values()):
            assert not per_token[~micro.mask].any()
            assert not per_token[:, -1].any()


def check_places(batch: TrainBatch, groups: list[RolloutGroup]) -> None:
    """Each example has positions and a number of its own, at the place that the batch says."""
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    known = batch.by_response("behavior_logprobs")
    for rollout, at, logprobs in zip(rollouts, batch.places, known, strict=True):
        micro, prompt = batch.mini_batches[at.mini][at.micro], rollout.prompt.tokens
        whole = slice(at.targets.start + 1 - len(prompt), at.targets.stop + 1)
        np.testing.assert_array_equal(micro.tokens[at.row, whole], [*prompt, *rollout.tokens])
        np.testing.assert_array_equal(
            micro.positions[at.row, whole], range(len(prompt) + len(rollout.tokens))
        )
        number = micro.responses[at.row, at.targets.start]
        own = np.flatnonzero(micro.responses[at.row] == number)
        assert number > 0 and own.tolist() == [*range(at.targets.start, at.targets.stop)]
        np.testing.assert_array_equal(logprobs, rollout.policy_logprobs)


# --- examples to imitate ----------------------------------------------------------------------------

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
