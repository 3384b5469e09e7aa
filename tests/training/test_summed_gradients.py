"""Gradients that are summed group by group are those of the whole batch."""

import jax
import numpy as np
import pytest
from trainers import CHAIN, CONFIG, IN_GROUPS, make_trainer, started

from pat_jax.layout.layout import Layout
from pat_jax.rl.algorithm.aggregation import Aggregation
from pat_jax.rl.batches.batches import TrainBatch, share_of, to_train_batch
from pat_jax.rl.batches.types import FinishReason, Prompt, Rollout, RolloutGroup
from pat_jax.training.summed_gradients import SummedGradients

SHAPES, GROUPS, SAMPLES, CAP = [(8, 16), (8, 32)], 5, 3, 20


def groups() -> list[RolloutGroup]:
    rng = np.random.default_rng(4)

    def response(prompt: Prompt, sample: int) -> Rollout:
        tokens = rng.integers(0, CONFIG.vocab_size, rng.integers(1, CAP), np.int32)
        is_cut = (prompt.id + sample) % 4 == 0
        finish = FinishReason.LENGTH if is_cut else FinishReason.STOP
        return Rollout(prompt, sample, tokens, np.full(len(tokens), -4.0), finish)

    prompts = [Prompt(i, tuple(rng.integers(0, 61, 1 + i).tolist()), "", {}) for i in range(GROUPS)]
    return [RolloutGroup(one, tuple(response(one, i) for i in range(SAMPLES))) for one in prompts]


def batch_of(chosen: slice, aggregation: Aggregation, *, is_without: bool = False) -> TrainBatch:
    advantages = np.random.default_rng(5).normal(size=(GROUPS, SAMPLES))
    if is_without:
        advantages[:] = np.nan
    return to_train_batch(
        groups()[chosen],
        advantages[chosen],
        mini_batch_size=GROUPS,
        micro_shapes=SHAPES,
        aggregation=aggregation,
        truncated="mask",
        max_completion_length=CAP,
    )


@pytest.mark.parametrize(
    ("aggregation", "layout"),
    [
        ("token", CHAIN["dp4tp2"]),
        ("sequence", IN_GROUPS[4]),
        ("constant", CHAIN["dp4tp2"]),
        pytest.param("token", IN_GROUPS[2], marks=pytest.mark.slow),
    ],
    ids=["token", "sequence-groups", "constant", "token-groups"],
)
def test_batches_that_are_added_one_by_one_are_one_update(aggregation: Aggregation, layout: Layout):
    trainer = make_trainer(layout, micro_shapes=SHAPES, targets=(), sums_early=True)
    whole, expected = trainer.update(started(trainer), batch_of(slice(None), aggregation))
    summed = SummedGradients(trainer, started(trainer))
    for part in (slice(3, 5), slice(0, 1), slice(1, 3)):
        batch = batch_of(part, aggregation)
        summed.add(batch, share_of(batch, aggregation))
    state, found = summed.apply()
    for ours, theirs in zip(*map(jax.tree.leaves, (state, whole)), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-6)
    assert found.metrics.keys() == expected.metrics.keys()
    for name, value in expected.metrics.items():
        assert found.metrics[name] == pytest.approx(value, rel=1e-4, abs=1e-6), name
    assert (found.applied, found.updates_applied) == ((True,), 1)
    assert expected.metrics["train/grad_norm"] > 0.01


def test_groups_without_a_token_in_the_loss_change_nothing():
    trainer = make_trainer(CHAIN["dp4tp2"], micro_shapes=SHAPES, targets=(), sums_early=True)
    summed = SummedGradients(trainer, before := started(trainer))
    params = [np.asarray(x) for x in jax.tree.leaves(before.params)]
    batch = batch_of(slice(None), "token", is_without=True)
    summed.add(batch, share_of(batch, "token"))
    state, found = summed.apply()
    assert np.isnan(found.metrics["train/loss"])
    for ours, theirs in zip(jax.tree.leaves(state.params), params, strict=True):
        np.testing.assert_array_equal(ours, theirs)
