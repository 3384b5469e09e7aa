"""The trackers of --trackers: checks that they are installed, and writes to them.

Weights & Biases writes online, or with WANDB_MODE=offline into the run's folder. Trackio writes
into a database on this machine, or to where its environment variables point.
"""

import math
import secrets
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from pat_jax.common.errors import UserError
from pat_jax.common.files import replace_text
from pat_jax.run.logging.samples import Sample, table
from pat_jax.run.logging.trackers.tracker import Tracker, describe_error

ID_FILE = "wandb_run_id"  # in the run's folder: a resumed run continues the same chart
_STEP = "step"  # axis of all charts: W&B's own counter would drop steps that a resumed run repeats


class WeightsAndBiases:
    """Writes to Weights & Biases. The run is named like its folder, where its id is kept. `options`
    are JSON values."""

    def __init__(self, folder: Path, project: str, options: Mapping[str, Any], *, is_resumed: bool):
        import wandb  # pyright: ignore[reportMissingImports]  # an extra

        self._table = wandb.Table
        ids = folder / ID_FILE
        run_id = ids.read_text(encoding="utf-8") if is_resumed and ids.exists() else None
        run_id = run_id or secrets.token_hex(4)
        self._run = wandb.init(
            project=project,
            name=folder.name,
            id=run_id,
            resume="allow",
            dir=str(folder),
            settings=wandb.Settings(console="off"),  # the terminal is the progress bar's
        )
        replace_text(ids, run_id)
        self._run.config.update(dict(options), allow_val_change=True)
        self._run.define_metric(_STEP)
        self._run.define_metric("*", step_metric=_STEP)

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        self._run.log({_STEP: step, **metrics})

    def samples(self, step: int, samples: Sequence[Sample]) -> None:
        columns, rows = table(step, samples)
        # None would make a column of numbers one of anything.
        data = [[math.nan if cell is None else cell for cell in row] for row in rows]
        self._run.log({_STEP: step, "samples": self._table(columns=columns, data=data)})

    def close(self) -> None:
        self._run.finish()


class Trackio:
    """Writes to Trackio. A resumed run continues the newest Trackio run with its name."""

    def __init__(self, folder: Path, project: str, options: Mapping[str, Any], *, is_resumed: bool):
        import trackio  # pyright: ignore[reportMissingImports]  # an extra

        self._table = trackio.Table
        self._run = trackio.init(
            project=project,
            name=folder.name,
            config=dict(options),
            resume="allow" if is_resumed else "never",
        )

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        self._run.log(dict(metrics), step=step)

    def samples(self, step: int, samples: Sequence[Sample]) -> None:
        columns, rows = table(step, samples)
        self._run.log({"samples": self._table(columns=columns, data=rows)}, step=step)

    def close(self) -> None:
        self._run.finish()


_TRACKERS: Mapping[str, type[WeightsAndBiases | Trackio]] = {
    "wandb": WeightsAndBiases,
    "trackio": Trackio,
}
_ADVICE = {
    "wandb": "log in with `wandb login`, or set WANDB_MODE=offline",
    "trackio": "look at its TRACKIO_ variables",
}


def check_trackers(names: Sequence[str]) -> None:
    """Raises UserError if the package of a tracker is not installed."""
    for name in names:
        spec = find_spec(name)
        # Without an origin it is a folder of that name, such as the one where W&B leaves offline runs.
        if spec is None or spec.origin is None:
            raise UserError(
                f"option --trackers is {' '.join(names)!r}: expected the package {name}, "
                f"which is not installed; run pip install -e '.[{name}]', or leave {name} out."
            )


def begin_trackers(
    names: Sequence[str],
    folder: Path,
    project: str,
    values: Mapping[str, Any],
    *,
    is_resumed: bool,
) -> dict[str, Tracker]:
    """Starts the trackers, and returns them by name. Raises UserError if one cannot start, such as
    without a login.

    Args:
      folder: the run's folder.
      values: the values of all options, by name.
    """
    begun: dict[str, Tracker] = {}
    for name in names:
        try:
            begun[name] = _TRACKERS[name](folder.resolve(), project, values, is_resumed=is_resumed)
        except Exception as error:  # what they raise has no common class
            raise UserError(
                f"option --trackers is {' '.join(names)!r}: {name} cannot begin a run "
                f"({describe_error(error)}); {_ADVICE[name]}, or leave it out; go on with --resume "
                f"--run_dir {folder}."
            ) from error
    return begun
