"""The trackers of --trackers: whether they can be used, and their beginning."""

from collections.abc import Mapping
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path
from typing import Protocol

from pat_jax.common.errors import UserError
from pat_jax.config.any_run import AnyRun
from pat_jax.run.logging.trackers.on_trackio import Trackio
from pat_jax.run.logging.trackers.tracker import Tracker, describe_error
from pat_jax.run.logging.trackers.weights_and_biases import WeightsAndBiases


class _Begin(Protocol):
    def __call__(
        self, folder: Path, project: str, options: Mapping[str, object], *, is_resumed: bool
    ) -> Tracker: ...


_TRACKERS: Mapping[str, _Begin] = {"wandb": WeightsAndBiases, "trackio": Trackio}
_ADVICE = {
    "wandb": "log in with `wandb login`, or set WANDB_MODE=offline",
    "trackio": "look at its TRACKIO_ variables",
}


def check_trackers(config: AnyRun) -> None:
    """
    Raises:
      UserError: the package of one is not installed.
    """
    for name in config.trackers:
        spec = find_spec(name)
        # Without an origin it is a folder of that name, such as the one where W&B leaves offline runs.
        if spec is None or spec.origin is None:
            raise UserError(
                f"option --trackers is {' '.join(config.trackers)!r}: expected the package {name}, "
                f"which is not installed; run pip install -e '.[{name}]', or leave {name} out."
            )


def begin_trackers(config: AnyRun, folder: Path) -> dict[str, Tracker]:
    """Each of them, by name.

    Raises:
      UserError: one cannot begin, such as without a login.
    """
    begun: dict[str, Tracker] = {}
    for name in config.trackers:
        try:
            begun[name] = _TRACKERS[name](
                folder.resolve(), config.tracker_project, asdict(config), is_resumed=config.resume
            )
        except Exception as error:  # what they raise has no common class
            raise UserError(
                f"option --trackers is {' '.join(config.trackers)!r}: {name} cannot begin a run "
                f"({describe_error(error)}); {_ADVICE[name]}, or leave it out; go on with --resume "
                f"--run_dir {config.run_dir}."
            ) from error
    return begun
