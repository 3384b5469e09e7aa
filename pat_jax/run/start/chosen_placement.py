"""A run whose placement was chosen: what the command that chose it hands to the run."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from pat_jax.config.run import RunConfig


@dataclass(frozen=True)
class ChosenPlacement:
    config: RunConfig  # with the placement in place of `auto`
    reason: str  # a sentence that begins with the placement
    table: str = ""  # the candidates and their prices; empty: there was nothing to choose from
    predicted_s: Mapping[str, float] = field(default_factory=dict)  # seconds of each stage
