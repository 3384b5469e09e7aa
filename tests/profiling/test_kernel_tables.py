"""Composing kernels: interpolation on made-up tables, and a few facts about the real ones."""

from functools import cache

import pytest
from fakes import SPLITS
from published import DATA, needs_data

from pat_jax.layout.buckets import Buckets
from pat_jax.models.presets import preset
from pat_jax.profiling.predict.composer import Composer
from pat_jax.profiling.predict.kernel_files import Interpolated, KernelTables, NoData
from pat_jax.profiling.predict.model_sizes import weight_bytes
from pat_jax.profiling.predict.targets import Target

DP8, DP4TP2, DP2TP4, TP8 = SPLITS
MEASURED = ("h100:8", "a100:8")


@cache
def measured_kernels(target: str) -> KernelTables:
    return KernelTables(DATA, Target.parse(target))


def test_a_line_goes_through_its_points_and_on_with_its_last_slope():
    line = Interpolated({1: 10.0, 2: 20.0, 4: 24.0})
    assert [line(size) for size in (1, 1.5, 2, 3, 4, 6)] == [10, 15, 20, 22, 24, 28]
    assert Interpolated({1: 5.0, 2: 4.0})(3) == 4.0  # noise is no downward slope
    assert Interpolated({3: 7.0})(100) == 7.0


def test_missing_data_is_said_in_one_sentence(tmp_path):
    with pytest.raises(NoData, match=r"no kernel tables in .*; name the folder .* with --data\.$"):
        KernelTables(tmp_path, Target.parse("h100:8"))


@needs_data
def test_a_step_of_llama_on_h100_is_near_the_published_one():
    """SGLang, August 2024, batch 1 and 128 input tokens: 7.37 ms at TP1, 3.35 ms at TP8."""
    composer = Composer(measured_kernels("h100:8"), preset("llama-3.1-8b"))
    assert composer.decode_step(DP8, 1, 128) == pytest.approx(7.37e-3, rel=0.25)
    assert composer.decode_step(TP8, 1, 128) == pytest.approx(3.35e-3, rel=0.5)


@needs_data
@pytest.mark.parametrize("target", MEASURED)
def test_a_latency_model_grows_and_crosses_over(target: str):
    buckets = Buckets.build(SPLITS, capacity=512, min_rows=1, min_length=512, max_length=4096)
    model = Composer(measured_kernels(target), preset("qwen3-14b")).latency_model(buckets)
    for split in SPLITS:
        for rows, more in zip(buckets.rows[split], buckets.rows[split][1:], strict=False):
            assert model.decode_step(split, rows, 512) <= model.decode_step(split, more, 512)
            assert model.decode_step(split, rows, 512) <= model.decode_step(split, rows, 4096)
    one, full = ([model.decode_step(s, -(-n // s.dp), 1024) for s in SPLITS] for n in (1, 512))
    assert one == sorted(one, reverse=True)  # few sequences: TP8 is the fastest
    assert min(full) < full[-1]  # a full batch: it is not
    # Upward, weights are read and written once, on the device.
    composer = Composer(measured_kernels(target), preset("qwen3-14b"), switch_s=0.0)
    shard = weight_bytes(preset("qwen3-14b")) / 8
    assert composer.reshard(DP8, TP8) == 2 * shard / composer.kernels.chip.memory_bytes_s
    assert composer.migrate(DP8, TP8) == pytest.approx(
        composer.round_tokens * 160 * 1024 * 7 / 8 / composer.kernels.chip.link_bytes_s
    )
