"""Optional files beside a run's checkpoints: a resumed run uses them, but can do without.

A file has a line with the checksum of the rest, which is an .npz archive. Knows arrays by their
names. Does not know what they are.
"""

import io
import logging
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from pat_jax.common.files import replace_bytes
from pat_jax.common.hosts.together import process_group
from pat_jax.run.checkpoints.files import CHECKPOINTS, checkpoints_in

log = logging.getLogger(__name__)
Arrays = Mapping[str, np.ndarray]


class SideFiles:
    """The files `RUN/NAME/step-N.bin`, one for the checkpoint of each step N. A file is written
    before its checkpoint. `what` describes their content in messages."""

    def __init__(self, run: Path, name: str, what: str):
        self._folder = run / name
        self._checkpoints = run / CHECKPOINTS
        self._what = what

    def path(self, step: int) -> Path:
        return self._folder / f"step-{step}.bin"

    def write(self, step: int, arrays: Arrays) -> None:
        """Writes a step's file in the first process. A failure costs one line of the log."""
        if not process_group().is_first:
            return
        try:
            self._folder.mkdir(exist_ok=True)
            self._forget(but=step)
            replace_bytes(self.path(step), as_bytes(arrays))
        except OSError as error:  # a run can do without it
            log.warning("%s are not in %s: %s", self._what, self._folder, error)

    def restore(self, step: int, take: Callable[[Arrays], None], expected: str) -> str:
        """Passes the arrays in the file of `step` to `take`, in every process. Returns "", or a
        sentence on why the file cannot be used: it cannot be read, or `take` raised ValueError. The
        sentence ends with what was `expected`."""
        content, why = process_group().agree(self._what, lambda: _content(self.path(step)))
        if content is not None:
            try:
                take(of_bytes(content))
            except ValueError as error:
                why = str(error)
        return why and f"{self.path(step)} {why}: expected {expected}."

    def _forget(self, but: int) -> None:
        """Deletes files whose checkpoint no longer exists, except for that of step `but`."""
        wanted = {self.path(int(path.name)) for path in checkpoints_in(self._checkpoints)}
        for path in {*self._folder.glob("step-*.bin")} - wanted - {self.path(but)}:
            path.unlink()


def as_bytes(arrays: Arrays) -> bytes:
    """Returns the content of a file with these arrays."""
    archive = io.BytesIO()
    named = dict[str, Any](arrays)
    # Without allow_pickle: NumPy before 2.2 would write it as one more array.
    np.savez(archive, **named)
    return _sealed(archive.getvalue())


def of_bytes(content: bytes) -> Arrays:
    """Returns the arrays that `as_bytes` was given. Raises ValueError if the content is damaged."""
    archive = content.partition(b"\n")[2]
    if _sealed(archive) != content:
        raise ValueError("is damaged (it has another checksum than when it was written)")
    with np.load(io.BytesIO(archive), allow_pickle=False) as found:
        return dict(found)


def _sealed(archive: bytes) -> bytes:
    return f"pat_jax arrays, version 2, CRC-32 {zlib.crc32(archive):08x}\n".encode() + archive


def _content(path: Path) -> tuple[bytes | None, str]:
    try:
        if path.exists() and not path.is_file():
            return None, "is no file"
        return path.read_bytes(), ""
    except FileNotFoundError:
        return None, "is not there"
    except OSError as error:
        return None, f"cannot be read ({error.strerror})"
