"""Options of `python -m pat_jax.profile`."""

from dataclasses import dataclass

from pat_jax.common.options.declared import option
from pat_jax.common.rules import count
from pat_jax.config.run import RunConfig


@dataclass(frozen=True)
class ProfileConfig(RunConfig):
    """Measures the time of each step of one model on this machine, for the planner of `train`.
    Takes the options of `train`, so that a run's --preset and --config can be used as they are.

        python -m pat_jax.profile --preset qwen2.5-0.5b
    """

    out: str = ""
    """The profile file. If it is empty, the file is written where train looks for it."""
    remeasure: bool = False
    """Measure all times again, including those that the file already has."""
    runs: int = option(3, count(1, 1000))
    """Number of timed runs of each program, of which the fastest counts."""
    shards: str = ""
    """A machine with several devices like those here, such as h100:8. For each of its layouts, the
    shard of one device is measured on one device here, and the time of its links is computed."""

    def _check_given(self) -> None:
        """Measuring takes no data."""
