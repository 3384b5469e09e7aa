"""Checkpoints of everything that a resumed run needs, written in the background by Orbax.

Knows pytrees, their shardings and JSON, and which checkpoint is to be used. Does not know what
state and metadata mean, nor how damaged files are recognized (`files.py`).
"""

import logging
import shutil
from collections.abc import Mapping
from concurrent import futures
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import Any, NoReturn, Self

import jax
import orbax.checkpoint as ocp

from pat_jax.common.errors import UserError
from pat_jax.common.hosts.together import FAILED, process_group
from pat_jax.common.hosts.waiting import START_AGAIN
from pat_jax.run.checkpoints.files import checkpoints_in, damage, lacking, move_aside
from pat_jax.run.checkpoints.meta import as_json, as_written, check_same, read_meta
from pat_jax.run.checkpoints.orbax_io import (
    MISTAKES,
    UNFINISHED,
    first_line,
    open_manager,
    read_part,
    reason,
    silence,
)

DAMAGED = "damaged_checkpoints"  # beside the folder of the checkpoints
Read = tuple[int, Any, dict[str, Any]]  # a checkpoint's step, state and metadata

log = logging.getLogger(__name__)


class SaveError(Exception):
    """A checkpoint could not be written; earlier ones are unchanged."""


def is_gone(state: Any) -> bool:
    """Returns whether arrays of the state were donated to a program and so no longer exist."""
    leaves = jax.tree.leaves(state)
    return any(isinstance(leaf, jax.Array) and leaf.is_deleted() for leaf in leaves)


class Checkpointer:
    """The checkpoints of one run: `directory/STEP`, each complete or not there at all.

    `restore` moves damaged checkpoints, and anything else in the folder, to the folder `DAMAGED`
    beside it.

    Args:
      directory: the folder of the checkpoints; created when missing.
      max_to_keep: number of checkpoints kept; an old one is deleted once a newer one is complete.
      fingerprint: the model's configuration, as JSON values. A checkpoint can only be used if it
        has the same. Saved with each checkpoint and compared before any array is read.
    """

    def __init__(
        self,
        directory: str | Path,
        max_to_keep: int = 2,
        *,
        fingerprint: Mapping[str, Any] | None = None,
    ):
        silence()
        self._directory = Path(directory).absolute()
        self._fingerprint = as_json(fingerprint or {})
        self.stepped_over: list[str] = []  # a sentence about each file that `restore` moved aside
        self._max_to_keep = max_to_keep
        self._open: ocp.CheckpointManager | None = None
        self._writer = ThreadPoolExecutor(1, "checkpoint")
        self._pending: tuple[int, Future[None]] | None = None

    @property
    def _manager(self) -> ocp.CheckpointManager:
        if self._open is None:
            self._open = open_manager(self._directory, self._max_to_keep)
        return self._open

    def save(self, step: int, state: Any, meta: Mapping[str, Any]) -> None:
        """Starts writing; the state may be donated as soon as this returns. Raises ValueError if
        there is a newer checkpoint, as this one could never be resumed from. Raises SaveError if
        this checkpoint cannot be begun, or if the last one could not be written.

        Args:
          step: steps done; saving the newest step again does nothing.
          state: a pytree of arrays.
          meta: JSON values; floats survive exactly, tuples come back as lists.
        """
        self.wait()
        latest = self.latest_step()
        if latest is not None and step < latest:
            raise ValueError(f"cannot save step {step}: {self._directory} already holds {latest}.")
        if step == latest:
            return
        content = {"fingerprint": self._fingerprint, "meta": dict(meta)}
        num_bytes = sum(leaf.nbytes for leaf in jax.tree.leaves(state))
        us = process_group()
        if short := us.agree("room on disk", lambda: lacking(self._directory, num_bytes)):
            raise self._failure(step, short)
        self._begin(step, state, content)
        self._pending = step, self._writer.submit(self._manager.wait_until_finished)
        if not us.is_alone:
            self.wait()  # the others would not learn of a failure in one process's background

    def _begin(self, step: int, state: Any, content: Mapping[str, Any]) -> None:
        saved, meta = ocp.args.StandardSave(state), ocp.args.JsonSave(content)
        error = None
        try:
            self._manager.save(step, args=ocp.args.Composite(state=saved, meta=meta))
        except MISTAKES as raised:
            error = raised
        us = process_group()
        why = first_line(error) if error else ""
        trouble = why and f"{us} could not begin the checkpoint of step {step} ({why})"
        found = us.gather("checkpoint begun", trouble, trouble=trouble)
        if 0 < len(failed := [*filter(None, found)]) < us.count:
            # The others wait in Orbax for a part that will not come.
            others = "the others cannot go on without its part"
            us.fail(f"{failed[0]}, and {others}{START_AGAIN}", FAILED)
        if error:
            self._abandon(step, why, error)

    def check(self) -> None:
        """Raises SaveError if the checkpoint being written has failed; does not wait."""
        if self._pending is not None and self._pending[1].done():
            self.wait()

    def wait(self) -> None:
        """Waits until no checkpoint is being written. Raises SaveError if that one failed."""
        if self._pending is None:
            return
        step, writing = self._pending
        futures.wait([writing])  # when this is interrupted, the save is still pending
        self._pending = None
        error = writing.exception()
        if error is not None and not isinstance(error, MISTAKES):
            raise error
        outcome = None if error is None else reason(error)
        if found := [one for one in process_group().gather("checkpoint", outcome) if one]:
            # A process that failed knows the reason; one that only timed out does not.
            self._abandon(step, min(found)[1], error)

    def _abandon(self, step: int, why: str, error: BaseException | None) -> NoReturn:
        self._close_manager()  # an open manager would wait for the failed save again
        if process_group().is_first:  # the next save may need the space
            for path in self._directory.glob(f"{step}{UNFINISHED}*"):
                shutil.rmtree(path, ignore_errors=True)
        log.error("the checkpoint of step %d was not written: %s", step, error or why)
        raise self._failure(step, why) from error

    def latest_step(self) -> int | None:
        """Returns the step of the checkpoint being written, else of the newest complete one, or
        None."""
        if self._pending is not None:
            return self._pending[0]
        return process_group().agree("newest checkpoint", self.newest_on_disk)

    def newest_on_disk(self) -> int | None:
        """Returns the step of the newest complete checkpoint that this process finds, or None."""
        steps = checkpoints_in(self._directory)
        return int(steps[-1].name) if steps else None

    def restore(self, abstract_state: Any) -> Read:
        """Restores the newest checkpoint that is not damaged. Raises UserError if there is none, or
        if it belongs to another model.

        Args:
          abstract_state: a pytree of `jax.ShapeDtypeStruct` with shardings, which need not be those
            of the saved state. A larger shape is filled up with zeros, a smaller one cuts the saved
            array: both concern padding only, as the fingerprints agree.

        Returns:
          Step, state and metadata.
        """
        self.wait()
        self._close_manager()
        us = process_group()
        us.agree("what is no checkpoint", self._move_strays)
        for path in reversed(us.agree("checkpoints", lambda: checkpoints_in(self._directory))):
            why = us.agree("a checkpoint's files", lambda path=path: damage(path))
            if why is None:
                return self._read(path, abstract_state)
            sentence = f"the checkpoint of step {path.name} is damaged: {why}"
            us.agree("a damaged checkpoint", partial(self._set_aside, path, sentence))
        damaged = f": damaged ones are in {folder}" if (folder := self._damaged).is_dir() else ""
        raise UserError(f"there is no checkpoint to resume from in {self._directory}{damaged}.")

    def as_written(self, step: int) -> AbstractContextManager[None]:
        """Returns `meta.as_written` for the checkpoint of `step`."""
        return as_written(self._directory / str(step))

    def close(self) -> None:
        """Waits for the checkpoint being written, and ignores whether it fails."""
        self._writer.shutdown()
        self._close_manager()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _read(self, path: Path, abstract_state: Any) -> Read:
        with as_written(path):
            read = read_meta(path)
        check_same(read["fingerprint"], self._fingerprint, self._directory)
        # Earlier versions kept a reference policy in the state, which is not asked for here.
        return int(path.name), read_part(path, abstract_state), read["meta"]

    @property
    def _damaged(self) -> Path:
        return self._directory.with_name(DAMAGED)

    def _failure(self, step: int, why: str) -> SaveError:
        kept = self.latest_step()
        stays = f"the one of step {kept} stays" if kept is not None else "there is none before it"
        return SaveError(
            f"the checkpoint of step {step} was not written to {self._directory} ({why}): {stays}"
        )

    def _move_strays(self) -> None:
        self._directory.mkdir(parents=True, exist_ok=True)
        others = {*self._directory.iterdir()} - {*checkpoints_in(self._directory)}
        for path in sorted(others):
            if UNFINISHED not in path.name:
                self._set_aside(path, f"{path.name!r} among the checkpoints is none")

    def _set_aside(self, path: Path, what: str) -> None:
        self.stepped_over.append(f"{what}; moved to {move_aside(path, self._damaged)}.")

    def _close_manager(self) -> None:
        if self._open is not None:
            opened = self._open
            self._open = None
            try:
                opened.close()
            except MISTAKES as error:  # the failed save's, once more
                log.debug("closed after %s", error)
