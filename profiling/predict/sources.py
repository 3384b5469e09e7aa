"""Where predicted step times are from, and how far they may be off."""

from dataclasses import dataclass
from pathlib import Path

from pat_jax.common.chips import Chip
from pat_jax.profiling.predict.kernel_model import BYTES, Source
from pat_jax.profiling.predict.links import shipped

EXPLAINED: dict[Source, str] = {
    "coefficients": "coefficients fitted to kernels measured on this chip",
    "chip data": "its maker's rates, and shares of them that a related chip was measured to reach",
    "profile": "a profile measured on this machine",
}
RANGES = Path(__file__).parent / "step_ranges.yaml"


@dataclass(frozen=True)
class StepRange:
    """The range of measured step times, as multiples of their predictions."""

    low: float
    high: float
    rows: int = 0  # measured steps; 0: those of this machine's profile
    own: int = 0  # how many of these are of this engine


FEWEST = 10  # measured steps; a range of fewer says nothing
OF_PROFILE = StepRange(0.98, 1.02)  # between the points of a profile: docs/notebook/benchmarks.md


def precision_of(weight_bytes: float) -> str:
    """Returns the precision of weights, as `step_ranges.yaml` names it."""
    return "bfloat16" if weight_bytes >= BYTES else "eight bits"


def range_of(chip: Chip, source: Source, weight_bytes: float = BYTES) -> StepRange | None:
    """Returns the range of step times on a chip, for weights of `weight_bytes` each. None if fewer
    than `FEWEST` steps were measured with such weights on its platform, or none on such a chip."""
    if source == "profile":
        return OF_PROFILE
    platform = shipped(RANGES.name).get(chip.platform, {})
    found = platform.get(precision_of(weight_bytes), {})
    is_known = chip.name in platform.get("chips", ()) and source in found
    if not is_known or found["rows"] < FEWEST:
        return None
    low, high = found[source]
    return StepRange(low, high, found["rows"], found["own"])
