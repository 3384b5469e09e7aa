"""Composing kernels: interpolation on made-up tables, and a few facts about the real ones."""

import math
from dataclasses import replace
from functools import cache

import numpy as np
import pytest
from fakes import SPLITS
from published import DATA, needs_data

from pat_jax.common.chips import chips
from pat_jax.layout.buckets import Buckets
from pat_jax.models.presets import preset
from pat_jax.planning.lengths.model import LengthModel
from pat_jax.planning.planner.planner import CostModelPlanner
from pat_jax.planning.planner.scripts import FixedLayout
from pat_jax.profiling.predict.composer import (
    UNLISTED,
    Composer,
    Unlisted,
)
from pat_jax.profiling.predict.kernel_files import Interpolated, KernelTables, NoData
from pat_jax.profiling.predict.kernel_model import ModelledKernels
from pat_jax.profiling.predict.model_sizes import weight_bytes
from pat_jax.profiling.predict.targets import Target
from pat_jax.profiling.simulate.machine import Machine, Workload
from pat_jax.profiling.simulate.simulator import replay

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


class FlatKernels(KernelTables):
    """Made up: a kernel takes a microsecond for every row."""

    def __init__(self):
        """Reads nothing."""
        chip = replace(chips()["h100"], memory_bytes_s=1e12, link_bytes_s=1e11)
        ModelledKernels.__init__(self, replace(Target.parse("h100:8"), chip=chip))

    def gemm(self, m: int, n: int, k: int) -> float:
        return 1e-3 * m

    def decode_attention(self, rows: int, length: int, heads: int, kv_heads: int) -> float:
        return 1e-3 * rows

    def prefill_attention(self, rows: int, length: int, heads: int, kv_heads: int) -> float:
        return 1e-3 * rows

    def all_reduce(self, devices: int, elements: int) -> float:
        return 0.0

    def all_gather(self, devices: int, elements: int) -> float:
        return 0.0


def test_groups_are_kept_even_where_several_are(monkeypatch):
    """A round is 512 tokens of 128 KiB, shared among the devices of a group; packing and unpacking it
    reads and writes it twice."""
    buckets = Buckets.build(SPLITS, capacity=64, min_rows=1, min_length=512, max_length=1024)
    monkeypatch.setitem(UNLISTED, "cuda", Unlisted())
    truth = Composer(FlatKernels(), preset("llama-3.1-8b")).latency_model(buckets)
    for split in (DP8, DP4TP2, DP2TP4):
        part = 512 * 128 * 1024 / split.tp
        packed, sent = 4 * part / 1e12, part / 1e11
        assert truth.shift_round(split) == pytest.approx(packed + sent)
    assert truth.shift_round(TP8) == math.inf
    machine = Machine(truth, SPLITS, buckets)
    # Those of the first group, to which every eighth is dealt, run on alone.
    responses = np.where(np.arange(64) % 8 == 0, 500, 16)
    workload = Workload(np.full(64, 10), responses, cap=500)
    lengths = LengthModel.empty(500).updated(responses, responses >= 500)
    static = replay(workload, CostModelPlanner((DP8,), truth, lengths), machine)
    assert [move.fullest for move in static.trace.balanced] == [(8, 1)]
    assert static.total_s < 0.5 * replay(workload, FixedLayout(DP8), machine).total_s


@needs_data
@pytest.mark.parametrize("target", MEASURED)
def test_a_measured_gemm_is_what_was_measured(target: str):
    kernels = measured_kernels(target)
    exact = {size: kernels.gemm(size, 4096, 4096) for size in (1, 64, 65, 2048)}
    assert exact[1] < exact[2048]
    # Between two measured widths the time lies between theirs.
    between = kernels.gemm(64, 5000, 4096)
    low, high = sorted((kernels.gemm(64, 4096, 4096), kernels.gemm(64, 5120, 4096)))
    assert low <= between <= high


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
