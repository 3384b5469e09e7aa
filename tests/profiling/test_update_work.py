"""What the programs of an update do, counted by hand, how it grows, and the least that it takes."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pat_jax.common.chips import chips
from pat_jax.models.config import ModelConfig
from pat_jax.models.presets import preset
from pat_jax.models.rematerialization import NONE, POLICIES
from pat_jax.profiling.capacity.role_passes import Packed
from pat_jax.profiling.predict.composer import Composer
from pat_jax.profiling.predict.kernel_model import ModelledKernels
from pat_jax.profiling.predict.targets import Target
from pat_jax.profiling.predict.update_times import ATTENTION, UpdateTimes
from pat_jax.profiling.predict.update_work import (
    Collective,
    Rows,
    UpdateWork,
    Work,
    apply_work,
    checksum_work,
    transfer_work,
)
from pat_jax.profiling.simulate.machine import Workload
from pat_jax.rl.batches.batches import to_train_batch
from pat_jax.rl.batches.packing import shapes
from pat_jax.rl.batches.train_batch import MicroBatch
from pat_jax.rl.batches.types import FinishReason, Prompt, Rollout, RolloutGroup
from pat_jax.training.model_flops import training_flops

# 2 layers, width 8, MLP 24, 4 query and 2 KV heads of 4, 64 words: a layer has 8 * (16 + 2 * 8) weights of
# queries, keys and values and 8 * 16 of the output, of which 256 + 128; and 3 * 8 * 24 of the MLP.
TINY = ModelConfig("llama", 64, 8, 24, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=4)
TINY = replace(TINY, vocab_multiple=1)
LAYER, LAST, HEAD = 384 + 576, 8 * 24, 64 * 8
TOKENS, PAIRS = 10, 33.0
ROWS = Rows(TOKENS, PAIRS)
WORK = UpdateWork(TINY, dp=4, fsdp=4)
# Bytes of what is no product of a layer, of each token: two norms of four passes, rotation of 32
# numbers in and out, the activation of 24 from 48; two bytes a number.
MOVED = 2 * (2 * 4 * 8 + 2 * 32 + 3 * 24)
LOGITS = 4 * 64


def test_forward_alone_by_hand():
    work = WORK.scores(ROWS)
    assert work.flops == 2 * TOKENS * (2 * LAYER + HEAD)
    assert work.num_bytes == TOKENS * (2 * MOVED + 2 * LOGITS)
    # Scores and their product with values: a multiplication and an addition for each pair and head.
    assert work.attention_flops == 2 * 2 * PAIRS * 2 * 4 * 4
    # Queries and results of four heads, keys and values of two.
    assert work.attention_bytes == 2 * TOKENS * 2 * 4 * (4 + 4 + 2 + 2)
    lookup = Collective("all-to-all", 4 * TOKENS * 8, 4)
    layers = Collective("all-gather", 2 * 2 * LAYER, 4)
    assert work.sent == (layers, Collective("all-gather", 2 * HEAD, 4), lookup)


def test_forward_and_backward_by_hand():
    work = WORK.gradients(ROWS)
    # Forward, anew but for the last product of the MLP, and twice backward; logits anew too.
    assert work.flops == 2 * TOKENS * (2 * (4 * LAYER - LAST) + 4 * HEAD)
    added = 3 * 4 * (2 * LAYER + 2 * HEAD) / 4
    # Logits are read twice forward and once backward; their gradients are half as large.
    assert work.num_bytes == TOKENS * (4 * 2 * MOVED + 3.5 * LOGITS) + added
    # Twice forward; backward scores and their gradients twice, gradients of queries, keys and values.
    assert work.attention_flops == (2 * 2 + 7) * 2 * PAIRS * 2 * 4 * 4
    assert work.sent[0] == Collective("all-gather", 2 * 2 * LAYER, 4, count=2)
    assert work.sent[3] == Collective("reduce-scatter", 2 * 2 * LAYER / 4, 4)
    assert work.sent[-1] == Collective("all-reduce", 4 * HEAD, 4)
    assert len(work.sent) == 6


def test_a_scalar_head_is_one_row_and_never_computed_anew():
    scalar = replace(WORK, model=replace(TINY, head="scalar"))
    scores, gradients = scalar.scores(ROWS), scalar.gradients(ROWS)
    assert scores.flops == 2 * TOKENS * (2 * LAYER + 8)
    assert scores.num_bytes == TOKENS * (2 * MOVED + 2 * 4)
    assert scores.sent[1] == Collective("all-gather", 2 * 8, 4)
    assert gradients.flops == 2 * TOKENS * (2 * (4 * LAYER - LAST) + 3 * 8)
    added = 3 * 4 * (2 * LAYER + HEAD + 8) / 4  # the embedding is as large as ever
    assert gradients.num_bytes == TOKENS * (4 * 2 * MOVED + 3.5 * 4) + added
    assert gradients.sent[-1] == Collective("all-reduce", 4 * 8, 4)


def test_the_optimizer_and_the_transfer_by_hand():
    """Gradients read twice and set to zero, parameters and state read and written."""
    work = apply_work(params=100, gradients=150, optimizer=200)
    assert work.num_bytes == 3 * 150 + 2 * 100 + 2 * 200 and work.host_bytes == 0
    offloaded = apply_work(params=100, gradients=150, optimizer=200, offloaded=180)
    assert offloaded == replace(work, host_bytes=2 * 180)
    work = transfer_work(params=100, gathered=400, kept=50, fsdp=8)
    assert work.num_bytes == 100 + 400 + 2 * 50
    assert work.sent == (Collective("all-gather", 400.0, 8),)
    assert transfer_work(100, 400, 50, fsdp=1).sent == ()
    assert checksum_work(100, 50).num_bytes == 150


def test_without_recomputing_it_is_what_the_model_asks_for_and_the_logits_once_more():
    work = replace(WORK, remat="none").gradients(Rows(1000, 1000 * 1001 / 2))
    asked = training_flops(TINY, np.array([1000]))
    attention = 6 * 2 * 4 * 4 * 1000**2
    assert work.flops - 2 * 1000 * HEAD == pytest.approx(asked - attention)
    assert work.attention_flops * 6 / 9 == pytest.approx(attention, rel=2e-3)


def test_each_policy_computes_less_anew_than_the_one_before():
    full, attention, dots, none = (
        replace(WORK, remat=remat).gradients(ROWS) for remat in (*POLICIES, NONE)
    )
    assert full.flops == attention.flops > dots.flops == none.flops
    assert full.attention_flops > attention.attention_flops == dots.attention_flops
    assert none.attention_flops == dots.attention_flops
    assert full.num_bytes == dots.num_bytes > none.num_bytes
    assert [x.sent[0].count for x in (full, attention, dots, none)] == [2, 2, 2, 1]


def test_a_frozen_policy_has_no_gradients():
    adapters = 700
    full, lora = WORK.gradients(ROWS), replace(WORK, adapter_weights=adapters).gradients(ROWS)
    products = 2 * TOKENS * (2 * LAYER + HEAD)
    assert full.flops - lora.flops == products - 2 * 4 * TOKENS * adapters
    assert lora.sent[-1] == Collective("all-reduce", 4 * adapters, 4)
    assert "reduce-scatter" not in {each.kind for each in lora.sent}
    forward = replace(WORK, adapter_weights=adapters).scores(ROWS).flops - WORK.scores(ROWS).flops
    assert forward == 2 * TOKENS * adapters


def test_groups_with_copies_send_each_other_nothing_in_a_pass():
    sent = UpdateWork(TINY, dp=8, fsdp=2).gradients(ROWS).sent
    assert sent == UpdateWork(TINY, dp=2, fsdp=2).gradients(ROWS).sent
    assert UpdateWork(TINY, dp=8, fsdp=1).gradients(ROWS).sent == ()
    alone = UpdateWork(TINY, dp=1, fsdp=1)
    assert alone.scores(ROWS).sent == alone.gradients(ROWS).sent == ()


LLAMA = preset("llama-3.1-8b")
TARGETS = ("h100:8", "a40:8", "v5e:2x4", "v6e:2x4")


def times_on(text: str) -> UpdateTimes:
    target = Target.parse(text)
    return UpdateTimes(Composer(ModelledKernels(target, sums="nccl"), LLAMA))


def test_every_chip_has_a_share_for_attention():
    assert ATTENTION.keys() == chips().keys()
    assert all(0 < share < 1 for share in ATTENTION.values())


@given(
    text=st.sampled_from(TARGETS),
    tokens=st.integers(1, 10**5),
    length=st.integers(1, 10**5),
    remat=st.sampled_from(["full", "attention", "dots", "none"]),
)
def test_nothing_is_faster_than_the_chip(text: str, tokens: int, length: int, remat: str):
    times, rows = times_on(text), Rows(tokens, tokens * length / 2)
    chip = times.composer.kernels.chip
    work = UpdateWork(LLAMA, 8, 8, remat).gradients(rows)
    spent = times.seconds(work, tokens)
    assert spent.products >= work.flops / chip.flops_s
    assert spent.attention >= work.attention_flops / chip.flops_s
    assert spent.attention >= work.attention_bytes / chip.memory_bytes_s
    assert spent.memory >= work.num_bytes / chip.memory_bytes_s
    assert spent.links >= 0
    more = UpdateWork(LLAMA, 8, 8, remat).gradients(Rows(tokens + 100, rows.pairs + 100))
    assert times.seconds(more, tokens + 100).total > spent.total


@pytest.mark.parametrize(("text", "rate"), [("h100:8", 64e9), ("v5e:2x4", 15e9), ("a40:8", 32e9)])
def test_what_comes_from_the_host_comes_at_the_rate_of_its_bus(text: str, rate: float):
    """Before the program and after it: nothing goes on meanwhile."""
    work = Work(num_bytes=1e9)
    spent = times_on(text).seconds(replace(work, host_bytes=3e9))
    assert spent.host == pytest.approx(3e9 / rate)
    assert replace(spent, host=0.0) == times_on(text).seconds(work)


SHAPES = shapes((16, 32, 64), 512, 4)


def seen(micro: MicroBatch, dp: int) -> float:
    """Pairs of a query and a key that it sees, on the device that has most; made of ones, whose padding is
    zeros."""
    pairs = np.where(
        micro.tokens > 0, micro.positions + 1, 0
    )  # of a branch, what it shares included
    return float(pairs.reshape(dp, -1).sum(1).max())


GROUPS = st.lists(
    st.tuples(st.integers(1, 16), st.lists(st.integers(1, 24), min_size=4, max_size=4)),
    min_size=1,
    max_size=8,
)


@given(GROUPS, st.sampled_from([1, 2, 4]), st.sampled_from([1, 2, 8]), st.booleans())
def test_as_a_trainer_packs_them(groups, dp: int, prompts: int, shares: bool):
    """With prompts that responses share, and with prompts of their own."""
    drawn = [
        RolloutGroup(prompt, [response_of(prompt, n) for n in responses])
        for number, (size, responses) in enumerate(groups)
        for prompt in [Prompt(number, (1,) * size, "", {})]
    ]
    batch = to_train_batch(
        drawn,
        np.ones((len(groups), 4)),
        mini_batch_size=prompts,
        micro_shapes=SHAPES,
        aggregation="token",
        truncated="score",
        shares_prompts=shares,
    )
    made = [micro for mini in batch.mini_batches for micro in mini]
    work = Workload(
        np.repeat([size for size, _ in groups], 4),
        np.array([n for _, responses in groups for n in responses]),
        48,
        np.repeat(np.arange(len(groups)) + 7, 4),
    )
    packed = Packed.of(work, 4 * prompts, SHAPES, dp, shares_prompts=shares)
    assert packed.slots == sum(micro.tokens.size for micro in made)
    assert packed.shapes == tuple(micro.tokens.shape for micro in made)
    assert packed.pairs == tuple(seen(micro, dp) for micro in made)
    assert packed.shared == tuple(batch.shared)
    unknown = Workload(work.prompts, work.responses, 48)  # of which prompt each is
    apart = Packed.of(work, 4 * prompts, SHAPES, dp)
    assert Packed.of(unknown, 4 * prompts, SHAPES, dp, shares_prompts=True) == apart


def response_of(prompt: Prompt, length: int) -> Rollout:
    zeros = np.zeros(length, np.float32)
    return Rollout(prompt, 0, np.ones(length, np.int32), zeros, FinishReason.STOP, zeros)
