"""Packed rows, rows of one example and rows whose examples share prompts give the same update, whatever
the loss sums over."""

from collections.abc import Sequence
from dataclasses import replace
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from chex import assert_trees_all_close
from hypothesis import given, settings
from hypothesis import strategies as st
from trainers import CONFIG, POLICY, host_weights

from pat_jax.config.learning import AlgorithmConfig
from pat_jax.config.rollout import RolloutConfig
from pat_jax.config.run import RunConfig
from pat_jax.layout.chain import layout_chain
from pat_jax.layout.mesh import factored_mesh
from pat_jax.models.kernels.row_attention import knows_branches
from pat_jax.models.policy import Params
from pat_jax.rl.algorithm.losses import LOGPROBS, Sums
from pat_jax.rl.algorithm.policy_loss import PolicyLoss
from pat_jax.rl.algorithm.predict import Predictor
from pat_jax.rl.algorithm.update import Update, zero_gradients
from pat_jax.rl.batches.batches import to_train_batch
from pat_jax.rl.batches.packing import shapes
from pat_jax.rl.batches.train_batch import MicroBatch, TrainBatch
from pat_jax.rl.batches.types import FinishReason, Prompt, Rollout, RolloutGroup
from pat_jax.training.build import micro_shapes
from pat_jax.training.passes import model_functions

LENGTH, MOST = 48, 8
SHAPES = shapes((24, LENGTH), budget=2 * LENGTH, row_multiple=1)


def groups(prompt: st.SearchStrategy[int], most: int) -> st.SearchStrategy:
    """Of two prompts: tokens of the prompt, of each response, and how it ended."""
    response = st.tuples(st.integers(1, most), st.sampled_from(FinishReason))
    group = st.tuples(prompt, st.lists(response, min_size=MOST // 2, max_size=MOST // 2))
    return st.lists(group, min_size=2, max_size=2)


def batch_of(
    lengths, rng: np.random.Generator, micro_shapes=SHAPES, *, shares_prompts: bool = False
) -> TrainBatch:
    groups = []
    for number, (prompt_length, responses) in enumerate(lengths):
        prompt = Prompt(number, tuple(rng.integers(0, 61, prompt_length).tolist()), "", {})
        rollouts = [
            Rollout(
                prompt,
                i,
                rng.integers(0, 61, length, np.int32),
                -rng.exponential(4.0, length).astype(np.float32),
                finish,
                -rng.exponential(4.0, length).astype(np.float32),
            )
            for i, (length, finish) in enumerate(responses)
        ]
        groups.append(RolloutGroup(prompt, rollouts))
    batch = to_train_batch(
        groups,
        rng.normal(size=(len(groups), MOST // 2)),
        mini_batch_size=len(groups),
        micro_shapes=micro_shapes,
        aggregation="sequence",
        truncated="mask",
        shares_prompts=shares_prompts,
    )
    for name in ("old_logprobs", "reference_logprobs"):
        known = batch.by_response("behavior_logprobs")
        near = [one + rng.normal(0, 0.05, one.shape).astype(np.float32) for one in known]
        batch = batch.with_column(name, near)
    return batch


def one_a_row(batch: TrainBatch) -> MicroBatch:
    """The same examples at the beginning of a row each."""
    (mini,) = batch.mini_batches
    arrays, tree = jax.tree.flatten(mini[0])
    moved = [np.zeros((MOST, LENGTH), x.dtype) for x in arrays]
    for row, at in enumerate(batch.places):
        micro = mini[at.micro]
        start = at.targets.start - int(micro.positions[at.row, at.targets.start])
        length = at.targets.stop + 1 - start
        for to, source in zip(moved, jax.tree.leaves(micro), strict=True):
            to[row, :length] = source[at.row, start : start + length]
    alone = jax.tree.unflatten(tree, moved)
    alone.responses[:] = alone.responses > 0
    return alone


@cache
def update_with(loss: PolicyLoss) -> Update:
    (layout,) = layout_chain(factored_mesh(jax.devices()[:1]), CONFIG)[0].values()
    model = model_functions(POLICY, layout, jnp.float32, remat="none")
    return Update(Predictor(model, CONFIG.vocab_size), optax.sgd(1.0), loss)


@cache
def gradient_of(loss: PolicyLoss):
    return jax.jit(update_with(loss).grad_step)


@cache
def predict():
    return jax.jit(update_with(PolicyLoss()).predictor.predict_step)


def gradient(loss: PolicyLoss, micro_batches: Sequence[MicroBatch]) -> tuple[Params, Sums]:
    grads, sums = zero_gradients(host_weights()), loss.zero_sums()
    for micro in micro_batches:
        grads, sums = gradient_of(loss)(host_weights(), micro, grads, sums)
    return jax.device_get((grads, sums))


@pytest.mark.parametrize(
    ("ratio", "correction"),
    [
        ("token", "none"),
        pytest.param("sequence", "sequence_mask", marks=pytest.mark.slow),
    ],
)
@settings(max_examples=8)
@given(lengths=groups(st.integers(1, 24), 24), seed=st.integers(0, 1000))
def test_packed_rows_give_the_update_of_rows_of_one_example(ratio, correction, lengths, seed):
    loss = PolicyLoss(ratio=ratio, correction=correction, beta=0.1, entropy_coef=0.01)
    batch = batch_of(lengths, np.random.default_rng(seed))
    packed, sums = gradient(loss, batch.mini_batches[0])
    wanted, wanted_sums = gradient(loss, [one_a_row(batch)])
    size = max(np.abs(x).max() for x in jax.tree.leaves(wanted))
    assert_trees_all_close(packed, wanted, rtol=1e-4, atol=1e-5 * (size + 1e-6))
    assert_trees_all_close(sums, wanted_sums, rtol=1e-4, atol=1e-5)


# Several responses fit beside a prompt; of one token there is nothing to share.
SHARED = groups(st.sampled_from([1, 2, 9, 20]), 12)


@pytest.mark.parametrize(
    "loss",
    [
        PolicyLoss(beta=0.1, entropy_coef=0.01),  # GRPO
        pytest.param(
            PolicyLoss(ratio="trajectory", correction="sequence_mask", beta=0.1, kl_estimator="k2"),
            marks=pytest.mark.slow,
        ),
    ],
    ids=lambda loss: f"{loss.surrogate}, {loss.ratio}",
)
@settings(max_examples=5)
@given(lengths=SHARED, seed=st.integers(0, 1000))
def test_shared_prompts_give_the_update_of_prompts_of_their_own(loss: PolicyLoss, lengths, seed):
    shared, apart = (
        batch_of(lengths, np.random.default_rng(seed), SHAPES[-1:], shares_prompts=is_shared)
        for is_shared in (True, False)
    )
    got, sums = gradient(loss, shared.mini_batches[0])
    wanted, wanted_sums = gradient(loss, apart.mini_batches[0])
    size = max(np.abs(x).max() for x in jax.tree.leaves(wanted))
    assert_trees_all_close(got, wanted, rtol=1e-4, atol=1e-5 * (size + 1e-6))
    assert_trees_all_close(sums, wanted_sums, rtol=1e-4, atol=1e-5)


@settings(max_examples=5)
@given(lengths=SHARED, seed=st.integers(0, 1000))
def test_shared_prompts_give_the_log_probabilities_of_prompts_of_their_own(lengths, seed):
    def scored(*, shares_prompts: bool) -> list[np.ndarray]:
        rng = np.random.default_rng(seed)
        batch = batch_of(lengths, rng, SHAPES[-1:], shares_prompts=shares_prompts)
        (mini,) = batch.mini_batches
        found = [np.asarray(predict()(host_weights(), micro)[LOGPROBS]) for micro in mini]
        return [found[at.micro][at.row, at.targets] for at in batch.places]

    both = zip(scored(shares_prompts=True), scored(shares_prompts=False), strict=True)
    for got, wanted in both:
        np.testing.assert_allclose(got, wanted, rtol=1e-5, atol=1e-5)


def test_prompts_are_shared_where_this_saves_micro_batches():
    lengths = [(20, [(5, FinishReason.STOP)] * 4)] * 2
    shared, apart = (
        batch_of(lengths, np.random.default_rng(0), shares_prompts=is_shared)
        for is_shared in (True, False)
    )
    assert not apart.shared.any() and sorted(shared.shared) == [0, 0, *[19] * 6]
    assert [m.tokens.shape for m in shared.mini_batches[0]] == [(2, 48)]
    assert shared.padding_efficiency == 2 * (20 + 5 + 3 * 6) / 96
    assert len(apart.mini_batches[0]) > 1


# --- the rows that a run has for responses that share their prompt --------------------------------


def config(*, generations: int = 4, budget: int = 8192) -> RunConfig:
    rollout = RolloutConfig(
        max_prompt_length=32, max_completion_length=128, num_generations=generations
    )
    algorithm = AlgorithmConfig(mini_batch_size=4, tokens_per_micro_batch=budget)
    return RunConfig(rollout=rollout, algorithm=algorithm)


def test_a_row_is_as_long_as_a_group_where_the_budget_has_room():
    """31 + 4 x (1 + 128) tokens."""
    assert micro_shapes(config().micro_batches, 1, "cpu") == [(1, 552), (2, 552), (4, 552)]
    assert micro_shapes(config().micro_batches, 4, "cpu")[-1] == (4, 552)
    assert micro_shapes(config(budget=1000).micro_batches, 2, "cpu")[-1] == (
        2,
        496,
    )  # three of four
    assert micro_shapes(config(budget=160).micro_batches, 1, "cpu") == micro_shapes(
        config(budget=160).micro_batches, 1, "tpu"
    )


@pytest.mark.parametrize("shards", [1, 2, 8])
@pytest.mark.parametrize("generations", [2, 4, 64])
@pytest.mark.parametrize("budget", [160, 1152, 8192])
def test_sharing_compiles_no_more_shapes(shards: int, generations: int, budget: int):
    with_it, without = (
        micro_shapes(config(generations=generations, budget=budget).micro_batches, shards, platform)
        for platform in ("cpu", "tpu")
    )
    assert len(with_it) <= len(without)
    most = max(budget, shards * without[-1][1])
    assert all(rows * length <= most and rows % shards == 0 for rows, length in with_it)
    assert with_it[-1][1] >= without[-1][1]


def test_a_supervised_stage_has_rows_for_its_batch():
    asked = replace(config(), warm_start=replace(config().warm_start, steps=1))
    assert micro_shapes(asked.micro_batches, 1, "cpu")[-1] == (14, 552)  # all that the budget holds


@pytest.mark.parametrize(
    ("platform", "is_known"), [("cpu", True), ("gpu", True), ("cuda", True), ("tpu", False)]
)
def test_prompts_are_shared_where_the_kernel_knows_branches(platform: str, is_known: bool):
    assert knows_branches(platform) is is_known
    apart = micro_shapes(config().micro_batches, 1, "tpu")
    assert (micro_shapes(config().micro_batches, 1, platform) == apart) is not is_known
