"""Chooses the kernel times of a target: measurements if they are at hand, else the model."""

from dataclasses import dataclass
from pathlib import Path

from pat_jax.common.chips import Chip
from pat_jax.profiling.predict.kernel_files import MEASURED, KernelTables
from pat_jax.profiling.predict.kernel_model import BYTES, ModelledKernels, Source
from pat_jax.profiling.predict.links import Sums, shipped
from pat_jax.profiling.predict.targets import Target

EXPLAINED: dict[Source, str] = {
    "tables": "kernel tables measured on this chip",
    "coefficients": "coefficients fitted to kernel tables of this chip",
    "chip data": "its maker's rates, and shares of them that a related chip was measured to reach",
    "profile": "a profile measured on this machine",
}
RANGES = Path(__file__).parent / "step_ranges.yaml"


@dataclass(frozen=True)
class StepRange:
    """The range of measured steps, as shares of their predictions."""

    low: float
    high: float
    rows: int = 0  # measured steps; 0: those of this machine's profile
    own: int = 0  # of them, of this engine


FEWEST = 10  # measured steps; a range of fewer says nothing
OF_PROFILE = StepRange(0.98, 1.02)  # between the points of a profile: docs/notebook/benchmarks.md


def precision_of(weight_bytes: float) -> str:
    """The precision of weights, as `step_ranges.yaml` names it."""
    return "bfloat16" if weight_bytes >= BYTES else "eight bits"


def range_of(chip: Chip, source: Source, weight_bytes: float = BYTES) -> StepRange | None:
    """The range of steps on a chip; None if fewer than `FEWEST` steps were measured on this kind of
    chip, and on its platform with such weights.

    Args:
      weight_bytes: of one number of a weight matrix.
    """
    if source == "profile":
        return OF_PROFILE
    platform = shipped(RANGES.name).get(chip.platform, {})
    found = platform.get(precision_of(weight_bytes), {})
    is_known = chip.name in platform.get("chips", ()) and source in found
    if not is_known or found["rows"] < FEWEST:
        return None
    low, high = found[source]
    return StepRange(low, high, found["rows"], found["own"])


def kernels_for(
    target: Target,
    data: Path | None = None,
    *,
    weight_bytes: float = BYTES,
    sums: Sums = "one-shot",
) -> ModelledKernels:
    """The best known times of a target's kernels; their `source` names where they are from.

    Args:
      data: folder that holds `calibration/`, the kernel tables.
      sums: how GPUs sum over NVLink. XLA's programs call NCCL. Serving engines have kernels of
        their own, for which there are the best measurements.
      weight_bytes: of one number of a weight matrix; the tables have bfloat16 only.
    """
    is_measured = target.chip.name in MEASURED and weight_bytes == BYTES
    if data is None or not (data / "calibration").is_dir() or not is_measured:
        return ModelledKernels(target, weight_bytes, sums)
    return KernelTables(data, target, sums)
