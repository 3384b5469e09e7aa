"""Checkpoints of everything that a resumed run needs, written in the background by Orbax.

Knows pytrees, their shardings and JSON, and which checkpoint is to be used. Does not know what the
state or the metadata mean, nor how damage shows in files (`checkpoint_files.py`).
"""

import logging
import shutil
import tempfile
from collections.abc import Mapping
from concurrent import futures
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, Self

import jax
import orbax.checkpoint as ocp

from pat_jax.common.errors import UserError
from pat_jax.common.hosts.together import company
from pat_jax.run.checkpoint_files import checkpoints_in, damage, is_sealed, move_aside, seal
from pat_jax.run.checkpoint_meta import as_json, check_same, read_meta

DAMAGED = "damaged_checkpoints"  # beside the folder of the checkpoints
# Of their bytes, what the arrays of a trained policy take on disk at least. Seen: 0.93 of random numbers,
# 0.79 of a state whose reference is as it was in bfloat16, 0.48 of such numbers alone.
COMPRESSED = 0.45
_ITEMS = ("state", "meta")
_UNFINISHED = ".orbax-checkpoint-tmp"  # in the names of those it has not finished
_PROBE = ".probe-"  # of the name of a folder that is made to see whether one can be

log = logging.getLogger(__name__)


class SaveError(Exception):
    """A checkpoint could not be written; those before it are as they were."""


class Checkpointer:
    """The checkpoints of one run: `directory/STEP`, each complete or not there at all.

    What else lies in the folder, and checkpoints that are damaged, are moved to the folder `DAMAGED`
    beside it when the newest is restored.

    Args:
      directory: where they lie; made when missing.
      max_to_keep: older ones are deleted after a newer one is complete.
      fingerprint: what must agree for a checkpoint to be usable (the model's configuration, as JSON
        values). Saved with each checkpoint and compared before any array is read.
    """

    def __init__(
        self,
        directory: str | Path,
        max_to_keep: int = 2,
        *,
        fingerprint: Mapping[str, Any] | None = None,
    ):
        _silence_orbax()
        self._directory = Path(directory).absolute()
        self._fingerprint = as_json(fingerprint or {})
        self.stepped_over: list[str] = []  # a sentence about each that `restore` moved aside
        self._max_to_keep = max_to_keep
        self._open: ocp.CheckpointManager | None = None
        self._writer = ThreadPoolExecutor(1, "checkpoint")
        self._pending: tuple[int, Future[None]] | None = None

    @property
    def _manager(self) -> ocp.CheckpointManager:
        if self._open is None:
            self._open = ocp.CheckpointManager(
                self._directory,
                item_names=_ITEMS,
                options=ocp.CheckpointManagerOptions(
                    preservation_policy=ocp.checkpoint_managers.LatestN(self._max_to_keep),
                    cleanup_tmp_directories=True,
                ),
            )
        return self._open

    def save(self, step: int, state: Any, meta: Mapping[str, Any]) -> None:
        """Start writing; the state may be donated as soon as this returns.

        Args:
          step: steps done; saving the newest step again does nothing.
          state: a pytree of arrays.
          meta: JSON values; floats survive exactly, tuples come back as lists.

        Raises:
          ValueError: there is a newer checkpoint, so that this one could never be resumed from.
          SaveError: this one cannot be begun, or the one before could not be written.
        """
        self.wait()
        latest = self.latest_step()
        if latest is not None and step < latest:
            raise ValueError(f"cannot save step {step}: {self._directory} already holds {latest}.")
        if step == latest:
            return
        content = {"fingerprint": self._fingerprint, "meta": dict(meta)}
        num_bytes = sum(leaf.nbytes for leaf in jax.tree.leaves(state))
        if short := company().agree("room on disk", lambda: self._lacking(num_bytes)):
            raise self._failure(step, short)
        try:
            self._manager.save(
                step,
                args=ocp.args.Composite(
                    state=ocp.args.StandardSave(state), meta=ocp.args.JsonSave(content)
                ),
            )
        except (OSError, ValueError, RuntimeError) as error:
            self._clear(step)
            log.error("the checkpoint of step %d was not written: %s", step, error)
            raise self._failure(step, _first_line(error)) from error
        self._pending = step, self._writer.submit(self._finish, step)
        if not company().is_alone:
            self.wait()  # what one process finds out in the background the others would not know

    def check(self) -> None:
        """Raises SaveError where the one being written has failed; does not wait."""
        if self._pending is not None and self._pending[1].done():
            self.wait()

    def wait(self) -> None:
        """Returns when nothing is being written; raises SaveError if it could not be."""
        if self._pending is None:
            return
        step, writing = self._pending
        futures.wait([writing])  # when this is interrupted, the save is still pending
        self._pending = None
        error = writing.exception()
        # Orbax's writers raise ValueError for a full disk.
        if error is not None and not isinstance(error, OSError | ValueError | RuntimeError):
            raise error
        found = company().gather("checkpoint", error and _first_line(error))
        if why := next(filter(None, found), None):
            self._clear(step)
            log.error("the checkpoint of step %d was not written: %s", step, error or why)
            raise self._failure(step, why) from error

    def latest_step(self) -> int | None:
        """The newest complete checkpoint, or the one being written; None when there is none."""
        if self._pending is not None:
            return self._pending[0]
        return company().agree("newest checkpoint", self._newest)

    def _newest(self) -> int | None:
        steps = checkpoints_in(self._directory)
        return int(steps[-1].name) if steps else None

    def restore(self, abstract_state: Any) -> tuple[int, Any, dict[str, Any]]:
        """The newest checkpoint that is whole; damaged ones are stepped over.

        Args:
          abstract_state: the structure wanted: a pytree of `jax.ShapeDtypeStruct` with shardings,
            which need not be those it was saved with.

        Returns:
          Its step, state and metadata.

        Raises:
          UserError: there is none, or it belongs to another model.
        """
        self.wait()
        self._close_manager()
        us = company()
        us.agree("what is no checkpoint", self._move_strays)
        for path in reversed(us.agree("checkpoints", lambda: checkpoints_in(self._directory))):
            is_whole, reason = us.agree(
                "a checkpoint's files",
                lambda path=path: (is_sealed(path), damage(path) if is_sealed(path) else None),
            )
            if is_whole and reason is None:
                return self._read(path, abstract_state)
            if not is_whole:
                try:
                    return self._read(path, abstract_state)
                except UserError:
                    raise
                except Exception as error:  # what Orbax raises has no common class, seen: bare ones
                    log.info("%s cannot be read", path, exc_info=error)
                    reason = f"it cannot be read ({_first_line(error)})"
            sentence = f"the checkpoint of step {path.name} is damaged: {reason}"
            us.agree("a damaged checkpoint", partial(self._set_aside, path, sentence))
        damaged = f": damaged ones are in {folder}" if (folder := self._damaged).is_dir() else ""
        raise UserError(f"there is no checkpoint to resume from in {self._directory}{damaged}.")

    def close(self) -> None:
        """Waits for what is being written, whatever becomes of it."""
        self._writer.shutdown()
        self._close_manager()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _read(self, path: Path, abstract_state: Any) -> tuple[int, Any, dict[str, Any]]:
        read = read_meta(path)
        check_same(read["fingerprint"], self._fingerprint, self._directory)
        with ocp.Checkpointer(ocp.CompositeCheckpointHandler()) as reader:
            wanted = ocp.args.Composite(state=ocp.args.StandardRestore(abstract_state))
            state = reader.restore(path, args=wanted)["state"]
        return int(path.name), state, read["meta"]

    @property
    def _damaged(self) -> Path:
        return self._directory.with_name(DAMAGED)

    def _finish(self, step: int) -> None:
        self._manager.wait_until_finished()
        if not company().is_first:
            return
        try:
            seal(self._directory / str(step))
        except OSError as error:  # complete and usable all the same
            log.warning("the checkpoint of step %d has no checksums: %s", step, error)

    def _lacking(self, num_bytes: int) -> str:
        """Why nothing can be written, in words. A disk that is full only while it is written to costs
        hundreds of lines of tracebacks, and a folder that Orbax cannot make leaves threads of its own
        that wait for it, and a process that does not end."""
        try:
            self._directory.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(prefix=_PROBE, dir=self._directory):
                free = shutil.disk_usage(self._directory).free
        except OSError as error:
            return str(error.strerror)
        if free >= COMPRESSED * num_bytes:
            return ""
        return f"it takes {num_bytes / 2**20:,.1f} MiB, of which {free / 2**20:,.1f} are free"

    def _failure(self, step: int, why: str) -> SaveError:
        kept = self.latest_step()
        stays = f"the one of step {kept} stays" if kept is not None else "there is none before it"
        return SaveError(
            f"the checkpoint of step {step} was not written to {self._directory} ({why}): {stays}"
        )

    def _clear(self, step: int) -> None:
        """What a failed save has left: its room may be what the next one needs."""
        self._close_manager()  # which would wait for the failed one again
        if not company().is_first:
            return
        for path in self._directory.glob(f"{step}{_UNFINISHED}*"):
            shutil.rmtree(path, ignore_errors=True)

    def _move_strays(self) -> None:
        self._directory.mkdir(parents=True, exist_ok=True)
        others = {*self._directory.iterdir()} - {*checkpoints_in(self._directory)}
        for path in sorted(others):
            if _UNFINISHED not in path.name:
                self._set_aside(path, f"{path.name!r} among the checkpoints is none")

    def _set_aside(self, path: Path, what: str) -> None:
        self.stepped_over.append(f"{what}; moved to {move_aside(path, self._damaged)}.")

    def _close_manager(self) -> None:
        if self._open is not None:
            opened, self._open = self._open, None
            try:
                opened.close()
            except (OSError, ValueError, RuntimeError) as error:  # the failed save's, once more
                log.debug("closed after %s", error)


def read_part(path: Path, abstract: Any) -> Any:
    """A part of the state of a complete checkpoint.

    Args:
      abstract: the structure of that part, as in `Checkpointer.restore`; where a shape is larger than
        what was saved, zeros are added.

    Raises:
      UserError: it cannot be read.
    """
    _silence_orbax()
    args = ocp.checkpoint_utils.construct_restore_args(abstract, strict=False)
    wanted = ocp.args.PyTreeRestore(abstract, restore_args=args, partial_restore=True)
    try:
        with ocp.Checkpointer(ocp.CompositeCheckpointHandler()) as reader:
            return reader.restore(path, args=ocp.args.Composite(state=wanted))["state"]
    except Exception as error:  # what Orbax raises has no common class
        log.info("%s cannot be read", path, exc_info=error)
        raise UserError(
            f"the checkpoint {path} cannot be read ({_first_line(error)}): expected a whole one; choose "
            "another."
        ) from error


def _first_line(error: Exception) -> str:
    """Orbax's errors name the cause last, behind every file that they went through."""
    text = str(error).splitlines()[0] if str(error) else type(error).__name__
    return text if len(text) < 160 else f"… {text[-120:]}"


def _silence_orbax() -> None:
    """Orbax reports every step of its work, a hundred lines a checkpoint where INFO is shown, and a
    failed save in hundreds, those of its event loop among them; ours is one."""
    for name in ("absl", "asyncio"):
        logging.getLogger(name).setLevel(logging.CRITICAL)
