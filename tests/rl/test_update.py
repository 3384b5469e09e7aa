"""The update on a model of three matrices that looks back over its row."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
from chex import assert_trees_all_close, assert_trees_all_equal

from pat_jax.rl.algorithm.advantages import group_advantages
from pat_jax.rl.algorithm.losses import ENTROPY, LOGPROBS, Loss, Sums
from pat_jax.rl.algorithm.optimizer import make_optimizer
from pat_jax.rl.algorithm.policy_loss import PolicyLoss
from pat_jax.rl.algorithm.predict import ModelFunctions, Predictor
from pat_jax.rl.algorithm.supervised import CrossEntropy
from pat_jax.rl.algorithm.update import Update, zero_gradients
from pat_jax.rl.batches.batches import to_supervised_batch, to_train_batch
from pat_jax.rl.batches.packing import shapes
from pat_jax.rl.batches.train_batch import MicroBatch
from pat_jax.rl.batches.types import FinishReason, Prompt, Rollout, RolloutGroup

VOCAB, PADDED, EMBED = 11, 16, 6
RATE, DECAY, TEMPERATURE = 0.1, 0.1, 0.8
ON_POLICY = PolicyLoss(is_on_policy=True)
WHOLE, SPLIT = [(16, 16)], [(2, 16)]


def forward(params, tokens, positions, routes):
    """A causal mean of the example's embeddings so far, mixed."""
    assert routes is None
    at = jnp.arange(tokens.shape[-1])
    back = at[:, None] - at[None]
    is_seen = (back >= 0)[None] & (back[None] <= positions[..., None])
    context = is_seen @ params["embedding"][tokens] / (1.0 + positions[..., None])
    return jnp.tanh(context @ params["mix"] + params["mix_bias"][None, None]), {}


def logits(params, hidden):
    return hidden @ params["head"]


def init_params(seed: int = 0):
    rng = np.random.default_rng(seed)
    shape = {"embedding": (PADDED, EMBED), "mix": (EMBED, EMBED), "head": (EMBED, PADDED)}
    params = {name: rng.normal(size=size) for name, size in shape.items()}
    params["mix_bias"] = rng.normal(size=EMBED)
    return {name: jnp.asarray(value, jnp.float32) for name, value in params.items()}


@functools.cache
def make_update(loss: Loss = ON_POLICY, learning_rate: float = RATE) -> Update:
    optimizer = make_optimizer(learning_rate=learning_rate, total_steps=10, weight_decay=DECAY)
    model = ModelFunctions(forward, lambda params: params["head"].T)
    return Update(Predictor(model, VOCAB, TEMPERATURE, logit_tokens=16), optimizer, loss)


class Programs:
    """Of an update, compiled as a run does it: what is added to and what is replaced is donated."""

    def __init__(self, update: Update):
        self.predict = jax.jit(update.predictor.predict_step)
        self.grad = jax.jit(update.grad_step, donate_argnums=(2, 3))
        self.apply = jax.jit(update.apply_step, donate_argnums=0)


programs = functools.cache(Programs)


def make_groups(num_groups: int = 3, num_samples: int = 2) -> list[RolloutGroup]:
    rng = np.random.default_rng(1)
    groups = []
    for number in range(num_groups):
        prompt = Prompt(number, tuple(map(int, rng.integers(1, VOCAB, rng.integers(1, 5)))), "", {})
        rollouts = []
        for sample in range(num_samples):
            tokens = rng.integers(1, VOCAB, rng.integers(1, 11)).astype(np.int32)
            logprobs = -rng.exponential(2.0, len(tokens)).astype(np.float32)
            rollouts.append(Rollout(prompt, sample, tokens, logprobs, FinishReason.STOP))
        groups.append(RolloutGroup(prompt, rollouts))
    return groups


def make_batch(micro_shapes, rewards=None) -> list[MicroBatch]:
    """One mini-batch of all groups."""
    groups = make_groups()
    if rewards is None:
        rewards = np.random.default_rng(2).normal(size=(len(groups), 2))
    batch = to_train_batch(
        groups,
        group_advantages(rewards),
        mini_batch_size=len(groups),
        micro_shapes=micro_shapes,
        aggregation="token",
        truncated="score",
    )
    return list(batch.mini_batches[0])


def gradient(update, params, micro_batches) -> tuple[dict[str, jax.Array], Sums]:
    grads, sums = zero_gradients(params), update.zero_sums()
    for micro in micro_batches:
        grads, sums = programs(update).grad(params, micro, grads, sums)
    return grads, sums


def with_policies(update, params, micro_batches) -> list[MicroBatch]:
    """Old and reference log-probabilities from two other sets of parameters."""
    predict = programs(update).predict
    near = jax.tree.map(lambda x, y: x + 0.2 * y, params, init_params(7))
    far = jax.tree.map(lambda x, y: x + 0.5 * y, params, init_params(8))
    found = []
    for micro in micro_batches:
        columns = {"old_logprobs": near, "reference_logprobs": far}
        added = {name: predict(of, micro)[LOGPROBS] for name, of in columns.items()}
        found.append(dataclasses.replace(micro, columns=micro.columns | added))
    return found


def test_accumulated_gradients_are_those_of_the_whole_batch():
    params, update = init_params(), make_update(PolicyLoss(beta=0.1))
    whole = with_policies(update, params, make_batch(WHOLE))
    several = shapes((8, 16), budget=32, row_multiple=2)
    split = with_policies(update, params, make_batch(several))
    assert len(whole) == 1 and len(split) > 2
    assert len({micro.tokens.shape for micro in split}) == len(several) == 2
    grads, sums = gradient(update, params, split)
    expected_grads, expected_sums = gradient(update, params, whole)
    assert_trees_all_close(grads, expected_grads, rtol=1e-4, atol=1e-6)
    assert_trees_all_close(sums, expected_sums, rtol=1e-4, atol=1e-6)
    assert 0 < sums["clip_fraction"] < 1 and sums["reference_kl"] > 0 and sums["behavior_gap"] > 0


def test_the_gradient_is_that_of_the_responses_one_by_one_without_padding():
    params, update = init_params(), make_update()
    rewards = np.random.default_rng(2).normal(size=(3, 2))
    groups, advantages = make_groups(), group_advantages(rewards)
    num_tokens = sum(len(r.tokens) for group in groups for r in group.rollouts)

    def policy_gradient_loss(params):
        total = 0.0
        for group, row in zip(groups, advantages, strict=True):
            for rollout, advantage in zip(group.rollouts, row, strict=True):
                tokens = jnp.array([*group.prompt.tokens, *rollout.tokens])
                scores = logits(
                    params,
                    forward(params, tokens[None, :-1], jnp.arange(len(tokens) - 1)[None], None)[0],
                )[0, :, :VOCAB]
                logprobs = jax.nn.log_softmax(scores / TEMPERATURE)
                first = len(group.prompt.tokens) - 1
                picked = logprobs[jnp.arange(len(tokens) - 1), tokens[1:]][first:]
                total -= float(advantage) * picked.sum() / num_tokens
        return total

    grads, _ = gradient(update, params, make_batch(SPLIT, rewards))
    assert_trees_all_close(
        grads, jax.jit(jax.grad(policy_gradient_loss))(params), rtol=1e-4, atol=1e-6
    )


def test_logprobs_and_entropies_are_zero_outside_the_responses():
    params, update = init_params(), make_update()
    for micro in make_batch(SPLIT):
        predicted = programs(update).predict(params, micro)
        assert predicted.keys() == {LOGPROBS, ENTROPY}
        for values in map(np.asarray, predicted.values()):
            assert np.all(values[~micro.mask] == 0) and np.all(values[micro.mask] != 0)


def test_the_first_step_is_clipped_adamw():
    eps, params, update = 1e-8, init_params(), make_update()
    grads = jax.tree.map(lambda x: 3.0 * x, init_params(5))
    state, grad_norm, _ = programs(update).apply(update.init(init_params()), grads)
    norm = np.sqrt(sum(np.square(np.asarray(g, np.float64)).sum() for g in grads.values()))
    np.testing.assert_allclose(grad_norm, norm, rtol=1e-5)
    for name, value in params.items():
        clipped = np.asarray(grads[name], np.float64) / norm
        step = clipped / (np.abs(clipped) + eps)
        step += (0.0 if name == "mix_bias" else DECAY) * np.asarray(value)
        np.testing.assert_allclose(state.params[name], value - RATE * step, rtol=1e-4, atol=1e-6)


def test_a_gradient_that_is_not_finite_changes_nothing():
    update, grads = make_update(), init_params(5)
    apply_step = programs(update).apply
    state, _, _ = apply_step(update.init(init_params()), grads)
    before = jax.device_get(state)
    for bad in (np.nan, np.inf):
        poisoned = {**grads, "mix": grads["mix"].at[1, 2].set(bad)}
        state, grad_norm, is_applied = apply_step(state, poisoned)
        assert not is_applied and not np.isfinite(grad_norm)
        assert_trees_all_equal(state, before)
    again, _, is_applied = apply_step(state, grads)
    assert is_applied and int(again.step) == 2
    assert not np.array_equal(again.params["mix"], before.params["mix"])


def test_the_state_and_the_accumulators_can_be_donated():
    """A buffer that could not be reused would be a warning, and warnings are errors."""
    update, (micro, *_) = make_update(), make_batch(SPLIT)
    state = update.init(init_params())
    grads, sums = zero_gradients(state.params), update.zero_sums()
    new_grads, _ = programs(update).grad(state.params, micro, grads, sums)
    programs(update).apply(state, new_grads)
    assert all(x.is_deleted() for x in jax.tree.leaves((grads, sums, state)))


DEMONSTRATIONS = [([1, 2], [3, 4, 5]), ([6], [7, 8]), ([9, 9, 9], [10])]


def test_grpo_on_demonstrations_is_the_cross_entropy():
    """The supervised stage takes the one for the other."""
    batch = to_supervised_batch(DEMONSTRATIONS, micro_shapes=SPLIT)
    wanted, wanted_sums = gradient(make_update(CrossEntropy()), init_params(), batch)
    assert wanted_sums.keys() == {"loss", "entropy", "weight"}
    got, sums = gradient(make_update(), init_params(), batch)
    assert_trees_all_close(got, wanted, rtol=1e-5, atol=1e-7)
    assert min(np.abs(x).max() for x in jax.tree.leaves(wanted)) > 1e-3
    for ours, theirs in (("cross_entropy", "loss"), ("entropy", "entropy")):
        np.testing.assert_allclose(sums[ours], wanted_sums[theirs], rtol=1e-5)
