"""Whole steps and switches: against published ones, and where a rule says what must come out."""

import pytest

from pat_jax.engine.buckets import Buckets
from pat_jax.models.presets import preset
from pat_jax.planning.types import Split
from pat_jax.profiling.costs.composer import Composer, weight_bytes
from pat_jax.profiling.costs.sources import kernels_for
from pat_jax.profiling.costs.targets import Target

LLAMA, LARGE = preset("llama-3.1-8b"), preset("llama-3.1-70b")


def test_one_wide_group_of_tpus_wins_with_few_sequences_and_loses_with_many():
    """Llama-3.1-70B on a v5e-16, weights in int8: TP16 against two groups of TP8."""
    composer = Composer(kernels_for(Target.parse("v5e:4x4"), weight_bytes=1), LARGE)

    def speed_up(sequences: int, length: int) -> float:
        two, one = Split(2, 8), Split(1, 16)
        return composer.decode_step(two, sequences // 2, length) / composer.decode_step(
            one, sequences, length
        )

    for length in (256, 1024, 2048):
        assert 1.15 < speed_up(8, length) < 2.0
        assert speed_up(128, length) < 1.0
        assert speed_up(16, length) > speed_up(32, length) > speed_up(64, length)


def test_a_step_is_never_faster_than_its_weights_are_read():
    for text in ("h100:8", "a40:8", "v5p:2x2x2"):
        composer = Composer(kernels_for(Target.parse(text)), LLAMA)
        for tp in (1, 2, 4, 8):
            # The embedding is looked up, not read.
            read = weight_bytes(LLAMA) - 2 * LLAMA.padded_vocab_size * LLAMA.embed_dim
            least = read / tp / composer.kernels.chip.memory_bytes_s
            assert composer.decode_step(Split(8 // tp, tp), 1, 128) > least


def test_the_host_is_paid_for_each_row():
    kernels = kernels_for(Target.parse("h100:8"))
    free, usual = (Composer(kernels, LLAMA, host_s_per_row=s) for s in (0.0, None))
    for rows in (1, 64):
        more = usual.decode_step(Split(8, 1), rows, 512) - free.decode_step(Split(8, 1), rows, 512)
        assert more == pytest.approx(1.4e-5 * rows)


def test_sums_are_two_a_layer_one_for_the_embedding_and_the_logits_are_gathered():
    kernels = kernels_for(Target.parse("v5e:2x4"))  # TPUs do not wait for each other
    composer = Composer(kernels, LLAMA)
    sums, gather = kernels.all_reduce(8, 16 * 4096), kernels.all_gather(8, 16 * 128_256)
    assert 1e3 * composer.decode_links_s(16, 8) == pytest.approx(65 * sums + gather)
    assert composer.decode_links_s(16, 1) == composer.prefill_links_s(1) == 0.0


@pytest.mark.parametrize(
    ("narrow", "wide", "moved"), [(1, 8, 7 / 8), (4, 8, 1 / 8), (8, 16, 1 / 8)]
)
def test_replicated_kv_heads_are_sent_to_every_device_that_has_them(
    narrow: int, wide: int, moved: float
):
    """Of the bytes of a round of a group; past 8 KV heads each device still holds one."""
    composer = Composer(kernels_for(Target.parse("v5e:4x4")), LARGE)
    up = Split(16 // narrow, narrow), Split(16 // wide, wide)
    whole = composer.round_tokens * LARGE.kv_bytes_per_token
    rate = composer.kernels.exchange_bytes_s(wide)
    assert composer.migrate(*up) == composer.migrate(*up[::-1])
    assert composer.migrate(*up) * rate / whole == pytest.approx(moved)


def test_a_latency_model_has_the_layouts_of_its_buckets():
    splits = (Split(16, 1), Split(2, 8), Split(1, 16))
    buckets = Buckets.build(splits, capacity=64, min_rows=4, min_length=512, max_length=2048)
    model = Composer(
        kernels_for(Target.parse("v5e:4x4")), LARGE, page_size=32, prefill_blocks=8
    ).latency_model(buckets)
    assert {split for split, _, _ in model.decode_table} == set(splits)
    assert (model.page_size, model.prefill_blocks, model.round_tokens) == (32, 8, 32 * 32)
    for split in splits:
        steps = [model.decode_step(split, rows, 512) for rows in buckets.rows[split]]
        assert steps == sorted(steps)
    assert model.shift_round(splits[0]) > 0.0
