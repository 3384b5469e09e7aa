"""The folder of a run: what lies where, and whether a run may write there."""

import logging
import os
from pathlib import Path

from pat_jax.config import RunConfig
from pat_jax.errors import UserError
from pat_jax.models.hf_export import check_export

CONFIG_FILE, CHECKPOINTS = "config.yaml", "checkpoints"


def check_run_dir(config: RunConfig) -> Path:
    """The run's folder, if it can be written; not made yet.

    Raises:
      UserError: it cannot be written, holds another run, or has nothing to resume.
    """
    folder, option = Path(config.run_dir), f"option --run_dir is {config.run_dir!r}"
    existing = folder
    while not os.path.exists(existing):  # False too where looking is forbidden
        existing = existing.parent
    if not existing.is_dir() or not os.access(existing, os.R_OK | os.W_OK | os.X_OK):
        raise UserError(f"{option}: expected a folder that can be written, but {existing} is none.")
    if config.resume and not (folder / CONFIG_FILE).is_file():
        raise UserError(f"{option}: expected the folder of a run to resume, with {CONFIG_FILE}.")
    if not config.resume and folder.is_dir() and any(folder.iterdir()):
        raise UserError(
            f"{option}: expected a new or empty folder; choose another, or --resume the run in it."
        )
    return folder


def check_export_dir(config: RunConfig) -> None:
    """Raises UserError where the policy cannot be written to the folder that is asked for."""
    if not (name := config.checkpoint.export_dir):
        return
    if Path(config.run_dir).absolute().is_relative_to(Path(name).absolute()):
        raise UserError(
            f"option --checkpoint.export_dir is {name!r}: expected a folder of its own, but the run "
            f"folder {config.run_dir!r} lies there; choose another, such as one in the run folder."
        )
    check_export(name)


def make_run_dir(config: RunConfig, folder: Path) -> None:
    """The first thing that a run writes."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:  # such as /proc, which says that it can be written
        raise UserError(
            f"option --run_dir is {config.run_dir!r}: expected a folder that can be written "
            f"({error.strerror})."
        ) from None


def log_to(path: Path) -> None:
    """What the package logs goes to this file, and nowhere else."""
    handler = logging.FileHandler(path)
    handler.setFormatter(logging.Formatter("%(asctime)s %(name)s: %(message)s"))
    package = logging.getLogger("pat_jax")
    package.addHandler(handler)
    package.setLevel(logging.INFO)
    package.propagate = False
