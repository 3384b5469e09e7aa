"""Machines that are not here, composed from published kernel measurements.

Measured, on the GPU named (aiconfigurator@095f58a5: SGLang 0.5.10, bf16): every GEMM, decode and
prefill attention of one layer, the all-reduce inside a CUDA graph. Between measured points times are
interpolated in a straight line; past the last one they go on with the slope of the last two. What is
computed and what is assumed: `profiling/predict/composer.py`.
"""

from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

from benchmarks.kernel_files import KernelTables
from pat_jax.config.rollout import RolloutConfig
from pat_jax.layout.buckets import NO_DRAFTS, Buckets, Drafts
from pat_jax.models.config import VOCAB_BLOCK
from pat_jax.models.presets import preset
from pat_jax.planning.latency.model import LatencyModel
from pat_jax.planning.types import Split
from pat_jax.profiling.predict.composer import SWITCH_S, Composer
from pat_jax.profiling.predict.links import Sums
from pat_jax.profiling.predict.targets import Target
from pat_jax.profiling.simulate.machine import Machine

GPUS = {"8xH100": "h100:8", "8xA100": "a100:8"}
NUM_DEVICES = 8
SPLITS = tuple(Split(NUM_DEVICES // tp, tp) for tp in (1, 2, 4, 8))
MODELS = ("llama-3.1-8b", "qwen3-14b")


@cache
def measured_kernels(data: Path, gpu: str, sums: Sums = "one-shot") -> KernelTables:
    """The tables of one of `GPUS`."""
    return KernelTables(data, Target.parse(GPUS[gpu]), sums)


def machine_of(
    kernels: KernelTables,
    model: str,
    size: int,
    lengths: tuple[int, int],
    *,
    switch_s: float = SWITCH_S,
    drafts: Drafts = NO_DRAFTS,
    **options: Any,
) -> Machine:
    """Where `size` sequences are replayed that all have rows.

    Args:
      lengths: of the longest prompt and of the longest response, tokens.
      options: of `Machine.of`.
    """
    latency = _latency(kernels, model, size, lengths, switch_s, drafts)
    options |= {"capacity": size, "runs_ahead": True, "drafts": drafts}
    return Machine.of(latency, SPLITS, options_of(lengths), **options)


def options_of(lengths: tuple[int, int]) -> RolloutConfig:
    """Of rollouts with so long prompts and responses."""
    return replace(
        RolloutConfig(),
        max_prompt_length=lengths[0],
        max_completion_length=lengths[1],
        min_rows=1,
        min_length=512,
    )


@cache
def _latency(
    kernels: KernelTables,
    model: str,
    size: int,
    lengths: tuple[int, int],
    switch_s: float,
    drafts: Drafts,
) -> LatencyModel:
    buckets = Buckets.of(SPLITS, size, options_of(lengths))
    padded = replace(preset(model), vocab_multiple=VOCAB_BLOCK * NUM_DEVICES)  # as a run pads it
    return Composer(kernels, padded, switch_s=switch_s).latency_model(buckets, drafts)
