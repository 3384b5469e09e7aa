"""Writes files that survive a kill in the middle of a write, and a full disk."""

import errno
import json
import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

log = logging.getLogger(__name__)


def replace_text(path: Path, text: str) -> None:
    """Replaces a file atomically: if the process dies, the file has the old or the new content."""
    replace_bytes(path, text.encode())


def replace_bytes(path: Path, content: bytes) -> None:
    """Replaces a file atomically, as `replace_text` does."""
    partial = path.with_name(f".{path.name}.partial")
    if path.exists() and not path.is_file():  # a folder, or a device that would be gone
        raise OSError(errno.EINVAL, "it is no file", str(path))
    try:
        partial.write_bytes(content)
        partial.replace(path)
    except OSError:  # such as a full disk, where the partial file must not stay
        partial.unlink(missing_ok=True)
        raise


def whole_lines(path: Path) -> bytes:
    """Returns a file's complete lines, without the half that a killed process may have left.
    Returns b"" if there is no file."""
    if path.exists() and not path.is_file():
        raise OSError(errno.EINVAL, "it is no file", str(path))
    content = path.read_bytes() if path.exists() else b""
    return content[: content.rfind(b"\n") + 1]


def open_lines(path: Path) -> "PatientFile":
    """Opens a file to append lines. If a killed run has left half a line, begins a new one."""
    file = PatientFile(path)
    with path.open("rb") as before:
        if before.seek(0, os.SEEK_END):
            before.seek(-1, os.SEEK_END)
            file.write(b"" if before.read(1) == b"\n" else b"\n")
    return file


class PatientFile:
    """Appends to a file. What a full disk does not take waits in memory until it can be written."""

    def __init__(self, path: str | Path):
        self._path = Path(path)
        self._file = open(path, "ab", buffering=0)  # noqa: SIM115 closed by close()
        self._pending = b""
        self._is_stuck = False

    def write(self, data: bytes) -> None:
        """Buffers the data until the next flush."""
        self._pending += data

    def write_row(self, row: Mapping[str, Any], **options: Any) -> None:
        """Writes a line of JSON, and flushes it. The options are those of `json.dumps`."""
        self.write(f"{json.dumps(row, **options)}\n".encode())
        self.flush()

    def flush(self) -> None:
        try:
            while self._pending:
                written = self._file.write(self._pending)  # fewer than asked for, at times
                self._pending = self._pending[written:]
            self._is_stuck = False
        except OSError as error:
            if not self._is_stuck:
                log.warning("%s waits in memory: %s", self._path, error)
            self._is_stuck = True

    def close(self) -> None:
        self.flush()
        if self._pending:
            log.error("%s lacks its last %d bytes", self._path, len(self._pending))
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()
