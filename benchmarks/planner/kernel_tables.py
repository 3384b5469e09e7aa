"""Decode steps of machines that are not here, composed from published kernel measurements.

Measured, on the GPU named (aiconfigurator@095f58a5: SGLang 0.5.10, bf16): every GEMM, decode and
prefill attention of one layer, the all-reduce inside a CUDA graph. Between measured points times are
interpolated in a straight line; past the last one they go on with the slope of the last two. What is
computed and what is assumed: `profiling/predict/composer.py`.
"""

from functools import cache
from pathlib import Path

from pat_jax.planning.types import Split
from pat_jax.profiling.predict.kernel_files import KernelTables
from pat_jax.profiling.predict.targets import Target

GPUS = {"8xH100": "h100:8", "8xA100": "a100:8"}
NUM_DEVICES = 8
SPLITS = tuple(Split(NUM_DEVICES // tp, tp) for tp in (1, 2, 4, 8))
MODELS = ("llama-3.1-8b", "qwen3-14b")


@cache
def measured_kernels(data: Path, gpu: str) -> KernelTables:
    """The tables of one of `GPUS`.

    Raises:
      NoData: they are not there.
    """
    return KernelTables(data, Target.parse(GPUS[gpu]))
