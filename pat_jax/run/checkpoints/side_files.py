"""Optional files beside a run's checkpoints: a resumed run uses them, but can do without.

Knows files. Does not know what is in them.
"""

import json
import logging
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from pat_jax.common.files import replace_bytes
from pat_jax.common.hosts.together import process_group
from pat_jax.common.json_text import parse_json
from pat_jax.run.checkpoints.files import CHECKPOINTS, checkpoints_in

log = logging.getLogger(__name__)
DAMAGED = "is damaged (it has another checksum than when it was written)"


class SideFiles:
    """The files `RUN/NAME/step-N.bin`, one for the checkpoint of each step N. A file is written
    before its checkpoint. `what` describes their content in messages."""

    def __init__(self, run: Path, name: str, what: str):
        self._folder = run / name
        self._checkpoints = run / CHECKPOINTS
        self._what = what

    def path(self, step: int) -> Path:
        return self._folder / f"step-{step}.bin"

    def write(self, step: int, content: bytes) -> None:
        """Writes a step's file in the first process. A failure costs one line of the log."""
        if not process_group().is_first:
            return
        try:
            self._folder.mkdir(exist_ok=True)
            self._forget(but=step)
            replace_bytes(self.path(step), content)
        except OSError as error:  # a run can do without it
            log.warning("%s are not in %s: %s", self._what, self._folder, error)

    def restore(self, step: int, take: Callable[[bytes], None], expected: str) -> str:
        """Passes the content of the file of `step` to `take`, in every process. Returns "", or a
        sentence on why the file cannot be used: it cannot be read, or `take` raised ValueError. The
        sentence ends with what was `expected`."""
        content, why = process_group().agree(self._what, lambda: _content(self.path(step)))
        if content is not None:
            try:
                take(content)
            except ValueError as error:
                why = str(error)
        return why and f"{self.path(step)} {why}: expected {expected}."

    def _forget(self, but: int) -> None:
        """Deletes files whose checkpoint no longer exists, except for that of step `but`."""
        wanted = {self.path(int(path.name)) for path in checkpoints_in(self._checkpoints)}
        for path in {*self._folder.glob("step-*.bin")} - wanted - {self.path(but)}:
            path.unlink()


def as_file(what: str, told: Mapping[str, Any], rest: bytes) -> bytes:
    """Returns a file's content: a line with its checksum, `told` as a line of JSON, and `rest`."""
    return sealed(what, json.dumps(told).encode() + b"\n" + rest)


def of_file(what: str, content: bytes) -> tuple[Any, bytes]:
    """Returns `told` and `rest` as given to `as_file`. Raises ValueError if the content is
    damaged."""
    body = content.partition(b"\n")[2]
    if sealed(what, body) != content:
        raise ValueError(DAMAGED)
    line, _, rest = body.partition(b"\n")
    return parse_json(line), rest


def sealed(what: str, body: bytes) -> bytes:
    """Returns `body` after a line that names its kind, `what`, and its checksum."""
    return f"pat_jax {what}, version 1, CRC-32 {zlib.crc32(body):08x}\n".encode() + body


def _content(path: Path) -> tuple[bytes | None, str]:
    try:
        if path.exists() and not path.is_file():
            return None, "is no file"
        return path.read_bytes(), ""
    except FileNotFoundError:
        return None, "is not there"
    except OSError as error:
        return None, f"cannot be read ({error.strerror})"
