"""A policy's first layers draft for it: no token changes, and the nearer they are to it, the more are right."""

from dataclasses import replace
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from after_warm_up import check_in_all_layouts
from fakes import made_up_latency
from generated_drafts import accepted, check, requests, with_share_of_the_last

from pat_jax.engine.device.decode.sampling import sequence_key
from pat_jax.engine.device.draft.generated import EarlyExit
from pat_jax.engine.sequences.responses import Request
from pat_jax.engine.sequences.sampling import Sampling
from pat_jax.engine.warm_up.warm_up import Warmup
from pat_jax.layout.buckets import Drafts
from pat_jax.rl.algorithm.predict import Predictor
from pat_jax.rl.algorithm.supervised import CrossEntropy
from pat_jax.rl.algorithm.update import Update
from pat_jax.rl.batches.batches import to_supervised_batch
from pat_jax.rl.batches.train_batch import TrainBatch
from pat_jax.training.exit_head import ExitHeadTrainer
from pat_jax.training.passes import model_functions
from pat_jax.training.trainable_params import TrainableParams
from pat_jax.training.trainer import Trainer
from pat_jax.training.transfer import Receivers
from tests.lossless import MODELS, Settings, Subject

pytestmark = pytest.mark.usefixtures("free_pages")

DRAFTS = Drafts(num_draft_tokens=(3,), longest=3, most_tokens=256, exit_layer=1)


@cache
def whole() -> Subject:
    settings = Settings(min_rows=16, min_length=64, drafter=EarlyExit(DRAFTS))
    return Subject(MODELS["kv2"], settings, num_devices=2)


@cache
def subject(share: float) -> Subject:
    """
    Args:
      share: of what the last layer adds; 0: the first says all.
    """
    return with_share_of_the_last(whole(), share)


def test_no_token_changes_and_the_nearer_the_first_layers_are_the_more_is_right():
    shares = []
    for share, tp in ((1.0, 1), (0.2, 2), (0.0, 2)):
        one = subject(share)
        report = check(one, replace(one.static(tp), num_draft_tokens=3))
        shares.append(accepted(report))
        assert {burst.num_draft_tokens for burst in report.bursts} == {3}
    # What is drafted behind the last token of a response is for nothing.
    assert 2 / 61 < shares[0] < shares[1] < shares[2] > 0.85  # by chance one of 61
    one = subject(0.2)
    report = check(one, replace(one.adaptive((1, 2, 1), "mixed", 16), num_draft_tokens=3))
    assert len(report.switches) == 2 and accepted(report) > 0.3


def test_after_the_warm_up_nothing_is_compiled():
    assert accepted(check_in_all_layouts(subject(0.2), requests(), 3)) > 0.3


def test_steps_whose_drafts_are_from_elsewhere_are_measured_anew():
    """What says the drafts is in their times."""
    split = next(iter(whole().engine.layouts))
    known = made_up_latency({split: 1.0}, {split: 0.1}, reshard=0.0, migrate_per_token=0.0)
    known = replace(known, verify_table={(split, 16, 64, 3): 2.0})
    for source, is_kept in (("texts", False), ("the first layer", True)):
        warmup = Warmup(whole().engine, known=replace(known, drafts_from=source))
        assert warmup.measured.decode_table == known.decode_table
        assert warmup.measured.verify_table == (known.verify_table if is_kept else {})
        assert warmup.measured.drafts_from == "the first layer"


def test_a_head_learns_what_its_policy_says():
    """By samples of it: then more of what the first layers say is right, of prompts not seen too."""
    one, shape = subject(0.5), (8, 64)
    layout = next(iter(one.engine.layouts.values()))
    model = model_functions(one.policy, layout, jnp.float32)
    update = Update(Predictor(model, 61), optax.sgd(0.0), CrossEntropy())
    trainer = Trainer(
        TrainableParams(one.policy, layout), update, Receivers(jnp.float32), micro_shapes=[shape]
    )
    learner = ExitHeadTrainer(
        trainer, depth=1, micro_shapes=[shape], dtype=jnp.float32, logit_tokens=512, temperature=0.5
    )
    learner.compile()
    params, losses = jax.device_put(one.params, trainer.shardings), []
    for seed in range(2, 18):
        asked = sampled_requests(seed)
        done, _ = one.run(asked, one.static(1))
        generated = [(x.tokens, y.tokens) for x, y in zip(asked, done, strict=True)]
        batch = TrainBatch([to_supervised_batch(generated, micro_shapes=[shape])], 1.0)
        losses += [learner.learn(params, batch)["train/exit_head_loss"] for _ in range(8)]
    planner = replace(one.static(1), num_draft_tokens=3)
    before, after = (
        accepted(one.run(sampled_requests(1), planner, head)[1]) for head in (None, learner.head)
    )
    unseen = losses[::8]  # of each batch before it is learned from
    assert np.mean(unseen[-4:]) < np.mean(unseen[:4]) - 0.1
    assert after > 1.15 * before


def sampled_requests(seed: int) -> list[Request]:
    rng = np.random.default_rng(seed)
    return [
        Request(
            tuple(rng.integers(3, 61, 10).tolist()),
            sequence_key(seed, i),
            48,
            Sampling(temperature=0.5),
        )
        for i in range(16)
    ]
