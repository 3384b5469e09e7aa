"""What the options of tracking have to be."""

from collections.abc import Sequence
from typing import Protocol

from pat_jax.common.rules import COUNT_OR_ZERO, GIVEN, check, require

TRACKERS = ("wandb", "trackio")


class TrackingOptions(Protocol):
    @property
    def trackers(self) -> Sequence[str]: ...


def check_tracking(config: TrackingOptions) -> None:
    """
    Raises:
      OptionError: a tracker is not known, or a number is out of bounds.
    """
    names = config.trackers
    require(
        set(names) <= set(TRACKERS) and len(set(names)) == len(names),
        "trackers",
        " ".join(names),
        f"{' or '.join(TRACKERS)}, each once (TensorBoard is always written)",
    )
    check(config, "tracker_project", GIVEN)
    check(config, "log_samples_every", COUNT_OR_ZERO)
