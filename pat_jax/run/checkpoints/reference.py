"""The reference policy of a run, saved once: it never changes, so no checkpoint holds it.

Knows Orbax and pytrees. Does not know where the policy came from.
"""

from pathlib import Path
from typing import Any

import orbax.checkpoint as ocp

from pat_jax.run.checkpoints.orbax_io import read_part, silence
from pat_jax.run.process.folder import CHECKPOINTS

FOLDER = "reference"  # in the run's folder


def save_reference(run_dir: str, params: Any) -> None:
    """Writes the parameters, and returns when they are on disk."""
    silence()
    state = ocp.args.StandardSave({FOLDER: params})
    with ocp.Checkpointer(ocp.CompositeCheckpointHandler()) as writer:
        path = Path(run_dir).absolute() / FOLDER
        writer.save(path, args=ocp.args.Composite(state=state), force=True)


def read_reference(run_dir: str, step: int, abstract: Any) -> Any:
    """Returns the parameters in the form of `abstract`. Earlier versions kept them in each
    checkpoint: they are read from that of `step`. Raises UserError if they cannot be read."""
    path = Path(run_dir).absolute() / FOLDER
    if not path.is_dir():
        path = path.with_name(CHECKPOINTS) / str(step)
    return read_part(path, {FOLDER: abstract})[FOLDER]
