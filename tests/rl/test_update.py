"""The update on a model of three matrices that looks back over its row."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from chex import assert_trees_all_close, assert_trees_all_equal

from pat_jax.rl.algorithm.advantages import group_advantages
from pat_jax.rl.algorithm.losses import Loss, Reduction, Sums
from pat_jax.rl.algorithm.optimizer import make_optimizer
from pat_jax.rl.algorithm.policy_loss import PolicyLoss
from pat_jax.rl.algorithm.update import ModelFunctions, PolicyUpdate, zero_gradients
from pat_jax.rl.batches.batches import MicroBatch, to_supervised_batch, to_train_batch
from pat_jax.rl.batches.packing import shapes
from pat_jax.rl.batches.types import FinishReason, Prompt, Rollout, RolloutGroup

VOCAB, PADDED, EMBED = 11, 16, 6
ON_POLICY = PolicyLoss(is_on_policy=True)
WHOLE, SPLIT = [(16, 16)], [(2, 16)]


def forward(params, tokens, positions):
    """A causal mean of the example's embeddings so far, mixed."""
    at = jnp.arange(tokens.shape[-1])
    back = at[:, None] - at[None]
    is_seen = (back >= 0)[None] & (back[None] <= positions[..., None])
    context = is_seen @ params["embedding"][tokens] / (1.0 + positions[..., None])
    return jnp.tanh(context @ params["mix"] + params["mix_bias"][None, None])


def logits(params, hidden):
    return hidden @ params["head"]


def init_params(seed: int = 0):
    rng = np.random.default_rng(seed)
    shape = {"embedding": (PADDED, EMBED), "mix": (EMBED, EMBED), "head": (EMBED, PADDED)}
    params = {name: rng.normal(size=size) for name, size in shape.items()}
    params["mix_bias"] = rng.normal(size=EMBED)
    return {name: jnp.asarray(value, jnp.float32) for name, value in params.items()}


@functools.cache
def make_update(
    loss: Loss = ON_POLICY, learning_rate: float = 1e-2, temperature: float = 1.0
) -> PolicyUpdate:
    optimizer = make_optimizer(learning_rate=learning_rate, total_steps=10, weight_decay=0.1)
    return PolicyUpdate(
        ModelFunctions(forward, logits), optimizer, VOCAB, loss, temperature, logit_tokens=16
    )


compiled = functools.cache(jax.jit)


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
    step = compiled(update.grad_step)
    grads, sums = zero_gradients(params), update.loss.zero_sums()
    for micro in micro_batches:
        grads, sums = step(params, micro, grads, sums)
    return grads, sums


def filled(micro: MicroBatch, **columns) -> MicroBatch:
    return dataclasses.replace(micro, columns=micro.columns | columns)


def with_policies(update, params, micro_batches) -> list[MicroBatch]:
    """Old and reference log-probabilities from two other sets of parameters."""
    logprob_step = compiled(update.logprob_step)
    near = jax.tree.map(lambda x, y: x + 0.2 * y, params, init_params(7))
    far = jax.tree.map(lambda x, y: x + 0.5 * y, params, init_params(8))
    return [
        filled(
            micro,
            old_logprobs=logprob_step(near, micro)[0],
            reference_logprobs=logprob_step(far, micro)[0],
        )
        for micro in micro_batches
    ]


def test_accumulated_gradients_are_those_of_the_whole_batch():
    params, update = init_params(), make_update(PolicyLoss(beta=0.1), temperature=0.8)
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
    params, temperature = init_params(), 0.8
    update = make_update(temperature=temperature)
    rewards = np.random.default_rng(2).normal(size=(3, 2))
    groups, advantages = make_groups(), group_advantages(rewards)
    num_tokens = sum(len(r.tokens) for group in groups for r in group.rollouts)

    def policy_gradient_loss(params):
        total = 0.0
        for group, row in zip(groups, advantages, strict=True):
            for rollout, advantage in zip(group.rollouts, row, strict=True):
                tokens = jnp.array([*group.prompt.tokens, *rollout.tokens])
                scores = logits(
                    params, forward(params, tokens[None, :-1], jnp.arange(len(tokens) - 1)[None])
                )[0, :, :VOCAB]
                logprobs = jax.nn.log_softmax(scores / temperature)
                first = len(group.prompt.tokens) - 1
                picked = logprobs[jnp.arange(len(tokens) - 1), tokens[1:]][first:]
                total -= float(advantage) * picked.sum() / num_tokens
        return total

    grads, _ = gradient(update, params, make_batch(SPLIT, rewards))
    assert_trees_all_close(
        grads, jax.jit(jax.grad(policy_gradient_loss))(params), rtol=1e-4, atol=1e-6
    )


def test_on_policy_the_policy_is_its_own_old_policy():
    params, on_policy, update = init_params(), make_update(), make_update(PolicyLoss())
    batch = make_batch(SPLIT)
    logprob_step = compiled(update.logprob_step)
    known = [filled(micro, old_logprobs=logprob_step(params, micro)[0]) for micro in batch]
    grads, sums = gradient(on_policy, params, batch)
    expected_grads, expected_sums = gradient(update, params, known)
    assert_trees_all_close(grads, expected_grads, rtol=1e-4, atol=1e-6)
    assert_trees_all_close(sums, expected_sums, rtol=1e-4, atol=1e-6)
    np.testing.assert_array_equal(sums["approx_kl"], 0)


def test_the_behavior_gap_is_the_distance_to_what_the_rollout_stored():
    params, update = init_params(), make_update()
    logprob_step = compiled(update.logprob_step)
    shifted = []
    for micro in make_batch(SPLIT):
        stored = logprob_step(params, micro)[0] - 0.25
        stored = stored.at[0].add(jnp.where(jnp.asarray(micro.mask[0]), -0.5, 0.0))
        shifted.append(filled(micro, behavior_logprobs=stored))
    _, sums = gradient(update, params, shifted)
    moved = sum(micro.weights[0].sum() for micro in shifted)
    np.testing.assert_allclose(sums["behavior_gap"], 0.25 + 0.5 * moved, rtol=1e-4)
    np.testing.assert_allclose(sums["behavior_gap_max"], 0.75, rtol=1e-4)


def test_logprobs_and_entropies_are_zero_outside_the_responses():
    params, update = init_params(), make_update()
    for micro in make_batch(SPLIT):
        for values in compiled(update.logprob_step)(params, micro):
            values = np.asarray(values)
            assert np.all(values[~micro.mask] == 0) and np.all(values[micro.mask] != 0)


def test_equal_rewards_leave_no_gradient():
    params, update = init_params(), make_update()
    grads, _ = gradient(update, params, make_batch(SPLIT, np.full((3, 2), 0.1)))
    assert_trees_all_equal(grads, zero_gradients(params))


def test_the_penalty_pulls_towards_the_reference():
    params, update = init_params(), make_update(PolicyLoss(is_on_policy=True, beta=0.1))
    batch = with_policies(update, params, make_batch(SPLIT, np.zeros((3, 2))))
    grads, before = gradient(update, params, batch)
    moved = jax.tree.map(lambda x, g: x - 0.1 * g, params, grads)
    _, after = gradient(update, moved, batch)
    np.testing.assert_allclose(before["loss"], 0.1 * before["reference_kl"], rtol=1e-5)
    assert after["reference_kl"] < before["reference_kl"]
    np.testing.assert_allclose(
        before["reference_kl"] - after["reference_kl"],
        sum(jnp.vdot(g, g) for g in grads.values()),
        rtol=0.1,
    )


def test_each_clip_is_that_of_the_update():
    params, batch = init_params(), make_batch(SPLIT)
    known = with_policies(make_update(), params, batch)
    fractions = [
        gradient(make_update(PolicyLoss(epsilon=low, epsilon_high=high)), params, known)[1]
        for low, high in ((0.1, 0.1), (0.1, 1e6), (0.999, 0.1), (0.999, 1e6))
    ]
    both, lower, upper, neither = (float(sums["clip_fraction"]) for sums in fractions)
    assert lower > 0 and upper > 0 and neither == 0
    np.testing.assert_allclose(both, lower + upper, rtol=1e-5)


def test_an_update_raises_the_probability_of_the_better_responses():
    update = make_update()
    state, batch = update.init(init_params()), make_batch(SPLIT)

    def objective(params):
        logprob_step = compiled(update.logprob_step)
        return sum(
            float((m.weights * m.columns["advantages"] * logprob_step(params, m)[0]).sum())
            for m in batch
        )

    before = objective(state.params)
    grads, _ = gradient(update, state.params, batch)
    state, _, is_applied = compiled(update.apply_step)(state, grads)
    assert is_applied and int(state.step) == 1
    assert objective(state.params) > before


def test_the_first_step_is_clipped_adamw():
    rate, eps, decay = 1e-2, 1e-8, 0.1
    params, update = init_params(), make_update()
    grads = jax.tree.map(lambda x: 3.0 * x, init_params(5))
    state, grad_norm, _ = compiled(update.apply_step)(update.init(params), grads)
    norm = np.sqrt(sum(np.square(np.asarray(g, np.float64)).sum() for g in grads.values()))
    np.testing.assert_allclose(grad_norm, norm, rtol=1e-5)
    for name, value in params.items():
        clipped = np.asarray(grads[name], np.float64) / norm
        step = clipped / (np.abs(clipped) + eps)
        step += (0.0 if name == "mix_bias" else decay) * np.asarray(value)
        np.testing.assert_allclose(state.params[name], value - rate * step, rtol=1e-4, atol=1e-6)


def test_a_learning_rate_of_zero_leaves_the_parameters_as_they_are():
    update, batch = make_update(learning_rate=0.0), make_batch(SPLIT)
    state = update.init(init_params())
    for _ in range(3):
        grads, _ = gradient(update, state.params, batch)
        state, grad_norm, is_applied = compiled(update.apply_step)(state, grads)
        assert grad_norm > 0 and is_applied
    assert_trees_all_equal(state.params, init_params())
    assert int(state.step) == 3


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_gradient_that_is_not_finite_changes_nothing(bad):
    update = make_update()
    apply_step = compiled(update.apply_step)
    grads = init_params(5)
    state, _, _ = apply_step(update.init(init_params()), grads)
    poisoned = {**grads, "mix": grads["mix"].at[1, 2].set(bad)}
    after, grad_norm, is_applied = apply_step(state, poisoned)
    assert not is_applied and not np.isfinite(grad_norm)
    assert_trees_all_equal(after, state)
    again, _, is_applied = apply_step(after, grads)
    assert is_applied and int(again.step) == 2
    assert not np.array_equal(again.params["mix"], state.params["mix"])


def test_the_state_and_the_accumulators_can_be_donated():
    """A buffer that could not be reused would be a warning, and warnings are errors."""
    update, (micro, *_) = make_update(), make_batch(SPLIT)
    state = update.init(init_params())
    grads, sums = zero_gradients(state.params), update.loss.zero_sums()
    step = jax.jit(update.grad_step, donate_argnums=(2, 3))
    new_grads, _ = step(state.params, micro, grads, sums)
    jax.jit(update.apply_step, donate_argnums=0)(state, new_grads)
    assert all(x.is_deleted() for x in jax.tree.leaves((grads, sums, state)))


@dataclasses.dataclass(frozen=True)
class CrossEntropy(Loss):
    """The plainest loss: it reads no column, and gives metrics of its own."""

    @property
    def metrics(self):
        return {"loss": Reduction.SUM, "surprise": Reduction.MAX}

    @property
    def needs(self):
        return ()

    def values(self, logprobs, entropy, columns, responses):
        del entropy, columns, responses
        return {"loss": -logprobs, "surprise": -logprobs}


DEMONSTRATIONS = [([1, 2], [3, 4, 5]), ([6], [7, 8]), ([9, 9, 9], [10])]


def test_supervised_steps_learn_the_responses():
    update = make_update(learning_rate=0.1)
    batch = to_supervised_batch(DEMONSTRATIONS, micro_shapes=SPLIT)
    state, losses = update.init(init_params()), []
    for _ in range(20):
        grads, sums = gradient(update, state.params, batch)
        state, _, _ = compiled(update.apply_step)(state, grads)
        losses.append(float(sums["cross_entropy"]))
    assert losses[-1] < 0.1 * losses[0]
    logprobs, _ = compiled(update.logprob_step)(init_params(), batch[0])
    np.testing.assert_allclose(losses[0], -(logprobs * batch[0].weights).sum(), rtol=1e-5)


def test_grpo_on_demonstrations_is_the_cross_entropy_and_any_loss_can_be_minimised():
    """The supervised stage takes the one for the other."""
    batch = to_supervised_batch(DEMONSTRATIONS, micro_shapes=SPLIT)
    wanted, wanted_sums = gradient(make_update(CrossEntropy()), init_params(), batch)
    assert wanted_sums.keys() == {"loss", "surprise", "weight"}
    got, sums = gradient(make_update(), init_params(), batch)
    assert_trees_all_close(got, wanted, rtol=1e-5, atol=1e-7)
    assert min(np.abs(x).max() for x in jax.tree.leaves(wanted)) > 1e-3
    np.testing.assert_allclose(sums["cross_entropy"], wanted_sums["loss"], rtol=1e-5)
    logprobs = [compiled(make_update().logprob_step)(init_params(), micro)[0] for micro in batch]
    np.testing.assert_allclose(wanted_sums["surprise"], -min(x.min() for x in logprobs), rtol=1e-5)


def test_updates_share_their_passes_where_all_but_the_optimizer_is_equal():
    update = make_update()
    other = make_update(PolicyLoss(is_on_policy=True), learning_rate=0.5)
    assert update != other and update.has_passes_of(other) and other.has_passes_of(update)
    for change in ({"temperature": 0.5}, {"loss": PolicyLoss()}, {"logit_tokens": 8}):
        assert not update.has_passes_of(dataclasses.replace(other, **change))
