"""Where the kernel times of a target come from: measurements where they are at hand, else the model."""

import math
from pathlib import Path

from pat_jax.profiling.predict.kernel_files import MEASURED, KernelTables
from pat_jax.profiling.predict.kernel_model import ModelledKernels
from pat_jax.profiling.predict.kernels import BYTES, Kernels, Source
from pat_jax.profiling.predict.links import Sums
from pat_jax.profiling.predict.targets import Chip, Target

EXPLAINED: dict[Source, str] = {
    "tables": "kernel tables measured on this chip",
    "coefficients": "coefficients fitted to kernel tables of this chip",
    "chip data": "its maker's rates, and shares of them that a related chip was measured to reach",
    "profile": "a profile measured on this machine",
}
# Mean error of steps of Llama-3.1-8B composed from an H100's tables, against measured ones that nothing
# here was fitted to, at the TP where it was largest (TP8; 5 % at TP1), before time outside of kernels was
# put right; of coefficients against tables.
OF_TABLES, OF_COEFFICIENTS = 0.13, 0.09
OF_PROFILE = 0.02  # between the points of a profile: `benchmarks/latency_error.py`


def error_of(chip: Chip, source: Source) -> float | None:
    """How far a predicted step may be off, as a share; None where none was compared with a real one."""
    if source == "profile":
        return OF_PROFILE
    if chip.platform == "tpu" or chip.name not in MEASURED:
        return None
    return OF_TABLES if source == "tables" else math.hypot(OF_TABLES, OF_COEFFICIENTS)


def kernels_for(
    target: Target,
    data: Path | None = None,
    *,
    weight_bytes: float = BYTES,
    kv_bytes: float = BYTES,
    sums: Sums = "one-shot",
) -> Kernels:
    """The best that is known of a target's kernels; their `source` says what that is.

    Args:
      data: folder that holds `calibration/`, the kernel tables.
      sums: how GPUs sum over NVLink. XLA's programs call NCCL; serving engines have kernels of
        their own, which are what is measured best.
      weight_bytes: of one number of a weight matrix; the tables have bfloat16 only.
      kv_bytes: of one number of the KV cache, likewise. The engine's are of bfloat16.
    """
    is_measured = target.chip.name in MEASURED and weight_bytes == kv_bytes == BYTES
    if data is None or not (data / "calibration").is_dir() or not is_measured:
        return ModelledKernels(target, weight_bytes, sums, kv_bytes)
    return KernelTables(data, target, sums)
