"""Where the kernel times of a target come from: measurements where they are at hand, else the model."""

from pathlib import Path

from pat_jax.profiling.costs.kernel_files import MEASURED, KernelTables
from pat_jax.profiling.costs.kernel_model import ModelledKernels
from pat_jax.profiling.costs.kernels import BYTES, Kernels, Source
from pat_jax.profiling.costs.links import Sums
from pat_jax.profiling.costs.targets import Target

EXPLAINED: dict[Source, str] = {
    "tables": "kernel tables measured on this chip",
    "coefficients": "coefficients fitted to kernel tables of this chip",
    "chip data": "its maker's rates, and shares of them that a related chip was measured to reach",
    "profile": "a profile measured on this machine",
}


def kernels_for(
    target: Target,
    data: Path | None = None,
    *,
    weight_bytes: float = BYTES,
    sums: Sums = "one-shot",
) -> Kernels:
    """The best that is known of a target's kernels; their `source` says what that is.

    Args:
      data: folder that holds `calibration/`, the kernel tables.
      sums: how GPUs sum over NVLink. XLA's programs call NCCL; serving engines have kernels of
        their own, which are what is measured best.
      weight_bytes: of one number of a weight matrix; the tables have bfloat16 only.
    """
    is_measured = target.chip.name in MEASURED and weight_bytes == BYTES
    if data is None or not (data / "calibration").is_dir() or not is_measured:
        return ModelledKernels(target, weight_bytes, sums)
    return KernelTables(data, target, sums)
