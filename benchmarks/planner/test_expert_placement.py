"""The other way to place experts: what a device holds there, and what it sends and reads."""

import argparse
from pathlib import Path

import pytest

from benchmarks.planner.expert_placement import InReplicas, in_replicas, question
from pat_jax.models.presets import preset
from pat_jax.planning.types import Split
from pat_jax.profiling.predict.composer import ONE, Composer
from pat_jax.profiling.predict.kernel_model import ModelledKernels
from pat_jax.profiling.predict.targets import Target

SMALL = preset("qwen3-30b-a3b")
SPLITS = tuple(Split(8 // tp, tp) for tp in (1, 2, 4, 8))
ASKED = argparse.Namespace(
    model="qwen3-30b-a3b",
    target="h100:8",
    sums="nccl",
    rollouts=1,
    data=Path("nowhere"),
    expert_width=1,
)


def test_each_replica_has_a_copy_and_layouts_without_room_for_one_are_left_out():
    memory, fitting = in_replicas(question(ASKED, "math", 128))
    held = [memory.weights[split] / 1e9 for split in SPLITS]
    assert held == pytest.approx((61.1, 30.5, 15.3, 7.6), rel=0.011)
    assert fitting == SPLITS
    large = argparse.Namespace(**{**vars(ASKED), "model": "qwen3-235b-a22b", "target": "h200:8"})
    assert in_replicas(question(large, "math", 128))[1] == SPLITS[2:]


def test_a_replica_of_its_own_gathers_no_rows_and_reads_what_its_rows_choose():
    kernels = ModelledKernels(Target.parse("h100:8"), sums="nccl")
    here, there = Composer(kernels, SMALL), InReplicas(kernels, SMALL)
    assert there.layer_links_ms(16, SPLITS[0], is_sparse=True) == 0.0
    assert here.layer_links_ms(16, SPLITS[0], is_sparse=True) > 0.0
    assert there.experts_ms(16, SPLITS[0]) == there.experts_ms(16, ONE)
    assert there.experts_ms(64, SPLITS[0]) > 4 * here.experts_ms(64, SPLITS[0])
    assert there.decode_step(SPLITS[3], 16, 1024) == here.decode_step(SPLITS[3], 16, 1024)
