"""What the options of tracking have to be."""

from collections.abc import Sequence
from typing import Protocol

from pat_jax.common.rules import GIVEN, check, require

TRACKERS = ("wandb", "trackio")


class TrackingOptions(Protocol):
    @property
    def trackers(self) -> Sequence[str]: ...

    @property
    def tracker_project(self) -> str: ...


def check_tracking(config: TrackingOptions) -> None:
    """
    Raises:
      OptionError: a tracker is not known, or its project has no name.
    """
    names = config.trackers
    require(
        set(names) <= set(TRACKERS) and len(set(names)) == len(names),
        "trackers",
        " ".join(names),
        f"{' or '.join(TRACKERS)}, each once (TensorBoard is always written)",
    )
    check(config, "tracker_project", GIVEN)
