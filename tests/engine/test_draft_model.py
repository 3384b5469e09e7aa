"""Models and first layers that draft for a policy: no token changes, and caches follow sequences."""

from dataclasses import replace
from functools import cache
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from after_warm_up import NowAndThen, check_in_all_layouts
from fakes import made_up_latency
from generated_drafts import (
    DRAFTER,
    DRAFTS,
    accepted,
    check,
    first_layer,
    requests,
    with_share_of_the_last,
)
from restless import Restless
from runs import QWEN3, SMALL_ROLLOUT, run, write_checkpoint, write_problems

from pat_jax.common.hosts.together import ProcessGroup
from pat_jax.engine.device.decode.sampling import sequence_key
from pat_jax.engine.device.draft.draft_model import DraftCache, ModelDrafter
from pat_jax.engine.device.draft.generated import EarlyExit
from pat_jax.engine.device_executor import Digest
from pat_jax.engine.sequences.responses import Request
from pat_jax.engine.sequences.sampling import Sampling
from pat_jax.engine.warm_up.warm_up import Warmup
from pat_jax.layout.buckets import Drafts
from pat_jax.models.policy import Params, Policy
from pat_jax.planning.planner.scripts import Step
from pat_jax.planning.types import Split
from pat_jax.rl.algorithm.predict import Predictor
from pat_jax.rl.algorithm.supervised import CrossEntropy
from pat_jax.rl.algorithm.update import Update
from pat_jax.rl.batches.batches import to_supervised_batch
from pat_jax.rl.batches.train_batch import TrainBatch
from pat_jax.run.logging.metrics import read_metrics
from pat_jax.training.exit_head import ExitHeadTrainer
from pat_jax.training.passes import model_functions
from pat_jax.training.trainable_params import TrainableParams
from pat_jax.training.trainer import Trainer
from pat_jax.training.transfer import Receivers
from tests.lossless import MODELS, Settings, Subject

pytestmark = pytest.mark.usefixtures("free_pages")


@cache
def whole(drafts: Drafts) -> Subject:
    settings = Settings(min_rows=16, min_length=64, drafter=replace(DRAFTER, drafts=drafts))
    return Subject(MODELS["kv2"], settings, num_devices=2)


@cache
def subject(share: float, drafts: Drafts = DRAFTS) -> Subject:
    """The draft model is the policy without its last layer, on pages of its own.

    Args:
      share: of what the last layer adds; 0: both say the same.
    """
    return with_share_of_the_last(whole(drafts), share)


def with_tokens(vocab_size: int, vocab_multiple: int) -> Subject:
    """The draft model is the policy without its last layer, with so many tokens, where the policy has 61: the first
    rows of its embedding, or zeros behind them, as padding is."""
    config = replace(
        MODELS["kv2"], num_layers=1, vocab_size=vocab_size, vocab_multiple=vocab_multiple
    )
    policy = Policy.from_config(config)

    def load(shardings: Params, dtype: jnp.dtype) -> Params:
        def fitted(x: jax.Array, like: jax.ShapeDtypeStruct) -> np.ndarray:
            out = np.zeros(like.shape, like.dtype)
            known = tuple(map(slice, np.minimum(x.shape, like.shape)))
            if x.shape != like.shape:  # of the vocabulary
                known = (slice(min(vocab_size, 61)), *known[1:])
            out[known] = np.asarray(x)[known]
            return out

        whole = first_layer(None, dtype)
        return jax.device_put(jax.tree.map(fitted, whole, policy.abstract_params), shardings)

    drafter = ModelDrafter(DRAFTS, policy, load)
    settings = Settings(min_rows=8, min_length=64, drafter=drafter)
    return with_share_of_the_last(Subject(MODELS["kv2"], settings, num_devices=2), 0.0)


def test_no_token_changes_and_a_model_that_says_the_same_is_right():
    """With switches and bursts without drafts too: it is always right as long as its cache has all that was said."""
    one = subject(0.0)
    # What is drafted behind the last token of a response is for nothing.
    assert accepted(check(one, replace(one.static(2), num_draft_tokens=3))) > 0.85
    steps = Step(Split(1, 2), 10), Step(Split(2, 1), 4)
    for planner in (
        replace(one.adaptive((1, 2, 1), "mixed", 16), num_draft_tokens=3),
        NowAndThen(Split(2, 1), steps, num_draft_tokens=3),
    ):
        report = check(one, planner)
        assert len(report.switches) == 2 and accepted(report) > 0.85
    assert {burst.num_draft_tokens for burst in report.bursts} == {0, 3}


def test_its_cache_follows_sequences_that_move_between_groups():
    report = check(subject(0.0), Restless(Split(2, 1), num_draft_tokens=3))
    assert len(report.balanced) > 2
    assert accepted(report) > 0.85


def test_it_has_pages_for_bursts_that_are_dispatched_behind_others(monkeypatch):
    """Of a chain of bursts the first alone is launched when all that was said is known."""
    one = subject(0.0)
    monkeypatch.setattr(one.engine, "runs_ahead", True)
    planner = replace(one.adaptive((1, 2, 1), "mixed", 16), num_draft_tokens=3)
    assert accepted(check(one, planner)) > 0.85


def test_a_model_that_says_other_things_changes_none():
    one = subject(1.0)
    report = check(one, replace(one.static(2), num_draft_tokens=3))
    assert 2 / 61 < accepted(report) < 0.5


@pytest.mark.slow  # an engine for each
def test_a_model_of_fewer_or_more_tokens_changes_none():
    """Tokens that a smaller one does not know are said by the policy, and shown to it; it never says them, nor what
    its embedding is padded with."""
    reports = []
    for vocab_size, multiple in ((56, 8), (56, 128), (160, 32)):
        one = with_tokens(vocab_size, multiple)
        generated, _ = one.run(requests(), one.static(1))
        shares = [np.mean(np.array(done.tokens) >= 56) for done in generated]
        assert 0.02 < np.mean(shares) < 0.5
        reports.append(check(one, replace(one.static(2), num_draft_tokens=3)))
    fewer, padded, more = reports
    assert accepted(fewer) > 0.2 and accepted(more) > 0.85
    assert (fewer.drafted, fewer.accepted) == (padded.drafted, padded.accepted)


def test_after_the_warm_up_nothing_is_compiled():
    """In any layout: its cache is made, filled, and filled again behind switches and bursts without drafts."""
    assert accepted(check_in_all_layouts(subject(0.0), requests(), 3)) > 0.85


@pytest.mark.slow  # an engine of its own
def test_while_a_group_holds_more_than_the_models_cache_it_decodes_without_drafts():
    """Four sequences of full length have room there: the last four of one replica, and of two
    replicas."""
    one = subject(0.0, replace(DRAFTS, cache_tokens=4 * 64))
    together = check(one, replace(one.static(2), num_draft_tokens=3)).bursts
    assert {burst.running > 4 for burst in together} == {True, False}
    assert all(burst.num_draft_tokens == (0 if burst.running > 4 else 3) for burst in together)
    apart = check(one, replace(one.static(1), num_draft_tokens=3))
    assert {burst.num_draft_tokens for burst in apart.bursts} == {0, 3} and accepted(apart) > 0.85


@pytest.mark.slow  # a whole command
@pytest.mark.parametrize("who", ["a model", "first layers"])
def test_runs_in_which_somebody_may_say_drafts(tmp_path: Path, who: str):
    """Loaded, compiled, warmed up and priced; whether there are drafts is the planner's choice."""
    model = write_checkpoint(tmp_path / "model", replace(QWEN3, num_layers=2))
    draft, folder = write_checkpoint(tmp_path / "draft"), tmp_path / "run"
    source = f"model:{draft}" if who == "a model" else "early_exit:1"
    output = run(
        *SMALL_ROLLOUT, "--model", str(model), "--data", str(write_problems(tmp_path / "sums.jsonl")),
        *("--rollout.max_prompt_length", "256", "--reward", "math", "--run_dir", str(folder)),
        *("--speculation.source", source, "--speculation.num_draft_tokens", "3", "--eval.every", "0"),
    )  # fmt: skip
    assert "2 steps in" in output
    metrics = read_metrics(folder / "metrics.jsonl")
    losses = [row["train/exit_head_loss"] for row in metrics if "train/exit_head_loss" in row]
    assert len(losses) == (2 if who == "first layers" else 0) and np.isfinite(losses).all()


def test_what_its_cache_holds_is_compared(monkeypatch):
    """By all processes, before each burst: one that had forgotten what was said would be named."""
    one, told = subject(0.0), []
    monkeypatch.setattr(ProcessGroup, "compare", lambda self, name, value: told[-1].append(value))
    pause = DraftCache.pause

    def forgetting(self: DraftCache) -> None:
        pause(self)
        self.known[:] = 0

    for forgets in (False, False, True):
        told.append([])
        with monkeypatch.context() as patch:
            if forgets:
                patch.setattr(DraftCache, "pause", forgetting)
            one.run(requests()[:8], replace(one.static(1), num_draft_tokens=3))
    known, again, forgot = told
    assert known == again
    first, second = next((a, b) for a, b in zip(known, forgot, strict=True) if a != b)
    assert isinstance(first, Digest)
    names = [name for name in Digest._fields if getattr(first, name) != getattr(second, name)]
    assert names == ["drafts"]


OF_LAYERS = Drafts(num_draft_tokens=(3,), longest=3, most_tokens=256, exit_layer=1)


@cache
def exiting() -> Subject:
    settings = Settings(min_rows=16, min_length=64, drafter=EarlyExit(OF_LAYERS))
    return Subject(MODELS["kv2"], settings, num_devices=2)


@cache
def exiting_subject(share: float) -> Subject:
    """
    Args:
      share: of what the last layer adds; 0: the first says all.
    """
    return with_share_of_the_last(exiting(), share)


def test_no_token_changes_and_the_nearer_the_first_layers_are_the_more_is_right():
    shares = []
    for share, tp in ((1.0, 1), (0.2, 2), (0.0, 2)):
        one = exiting_subject(share)
        report = check(one, replace(one.static(tp), num_draft_tokens=3))
        shares.append(accepted(report))
        assert {burst.num_draft_tokens for burst in report.bursts} == {3}
    # What is drafted behind the last token of a response is for nothing.
    assert 2 / 61 < shares[0] < shares[1] < shares[2] > 0.85  # by chance one of 61
    one = exiting_subject(0.2)
    report = check(one, replace(one.adaptive((1, 2, 1), "mixed", 16), num_draft_tokens=3))
    assert len(report.switches) == 2 and accepted(report) > 0.3


def test_after_the_warm_up_first_layers_compile_nothing():
    assert accepted(check_in_all_layouts(exiting_subject(0.2), requests(), 3)) > 0.3


def test_steps_whose_drafts_are_from_elsewhere_are_measured_anew():
    """What says the drafts is in their times."""
    split = next(iter(exiting().engine.layouts))
    known = made_up_latency({split: 1.0}, {split: 0.1}, reshard=0.0, migrate_per_token=0.0)
    known = replace(known, verify_table={(split, 16, 64, 3): 2.0})
    for source, is_kept in (("texts", False), ("the first layer", True)):
        warmup = Warmup(exiting().engine, known=replace(known, drafts_from=source))
        assert warmup.measured.decode_table == known.decode_table
        assert warmup.measured.verify_table == (known.verify_table if is_kept else {})
        assert warmup.measured.drafts_from == "the first layer"


def test_a_head_learns_what_its_policy_says():
    """By samples of it: then more of what the first layers say is right, of prompts not seen too."""
    one, shape = exiting_subject(0.5), (8, 64)
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
