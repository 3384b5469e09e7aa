"""The reference policy of a run, saved once: it never changes, so no checkpoint holds it.

Knows Orbax and pytrees. Does not know where the policy came from.
"""

from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp

from pat_jax.common.errors import UserError
from pat_jax.common.hosts.together import process_group
from pat_jax.run.checkpoints.files import CHECKPOINTS, damage, lacking
from pat_jax.run.checkpoints.orbax_io import MISTAKES, open_writer, read_part, reason

FOLDER = "reference"  # in the run's folder


def save_reference(run_dir: str, params: Any) -> None:
    """Writes the parameters, and returns when they are on disk. Raises UserError if they cannot be
    written."""
    path = Path(run_dir).absolute() / FOLDER
    num_bytes = sum(leaf.nbytes for leaf in jax.tree.leaves(params))
    room = process_group().agree("room for the reference", lambda: lacking(path.parent, num_bytes))
    if why := room or _written(path, params):
        raise UserError(
            f"the reference policy was not written to {path} ({why}): a resumed run needs it; make room "
            "there, or give another --run_dir."
        )


def _written(path: Path, params: Any) -> str:
    """Writes the parameters. Returns why they were not written, or ""."""
    content = {"state": ocp.args.StandardSave({FOLDER: params}), "meta": ocp.args.JsonSave({})}
    try:
        with open_writer() as writer:
            writer.save(path, args=ocp.args.Composite(**content), force=True)
    except MISTAKES as error:
        return reason(error)[1]
    return ""


def read_reference(run_dir: str, step: int, abstract: Any) -> Any:
    """Returns the parameters in the form of `abstract`. Raises UserError if they cannot be read.

    Earlier versions kept them in each checkpoint. Then they are read from the checkpoint of `step`,
    and saved here, because later checkpoints lack them."""
    path = Path(run_dir).absolute() / FOLDER
    us = process_group()
    if us.agree("whether there is a reference", path.is_dir):
        why = us.agree("the reference's files", lambda: damage(path))
        if why is None:
            return read_part(path, {FOLDER: abstract})[FOLDER]
        raise UserError(f"the reference policy in {path} is damaged ({why}); {_INSTEAD}.")
    try:
        found = read_part(path.with_name(CHECKPOINTS) / str(step), {FOLDER: abstract})[FOLDER]
    except UserError as error:
        raise UserError(
            f"the reference policy of this run is gone: expected the folder {path}; {_INSTEAD}."
        ) from error
    save_reference(run_dir, found)
    return found


_INSTEAD = "it was saved once, when the run began: copy that folder back, or begin anew with another --run_dir"
