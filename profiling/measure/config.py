"""Options of `python -m pat_jax.profile`."""

from dataclasses import dataclass

from pat_jax.common.options.declared import option
from pat_jax.common.rules import count
from pat_jax.config.run import RunConfig


@dataclass(frozen=True)
class ProfileConfig(RunConfig):
    """Measures the time of each step of one model on this machine, for the plans of `train`. Takes
    the options of `train`, so that a run's --preset and --config can be used as they are.

        python -m pat_jax.profile --preset qwen2.5-0.5b
    """

    out: str = ""
    """The profile file; empty puts it where train looks for it."""
    remeasure: bool = False
    """Measure everything anew, whatever the file holds."""
    runs: int = option(3, count(1, 1000))
    """Timed runs of each program; the fastest counts."""
    shards: str = ""
    """A machine of several devices like this one, such as h100:8. The shard of each of its layouts
    is measured on one device here, and the time of its links is computed."""

    def _check_given(self) -> None:
        """Measuring takes no data."""
