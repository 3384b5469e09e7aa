"""Files beside a run's checkpoints: what a resumed run would miss, but could do without.

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
from pat_jax.run.checkpoints.files import checkpoints_in
from pat_jax.run.process.folder import CHECKPOINTS

log = logging.getLogger(__name__)
DAMAGED = "is damaged (it has another checksum than when it was written)"


class SideFiles:
    """`RUN/NAME/step-N.bin` for the checkpoint of step N, written before it: where that is
    complete, so is the file. `what` they hold is for people."""

    def __init__(self, run: Path, name: str, what: str):
        self._folder, self._checkpoints, self._what = run / name, run / CHECKPOINTS, what

    def path(self, step: int) -> Path:
        return self._folder / f"step-{step}.bin"

    def write(self, step: int, content: bytes) -> None:
        """By the first process; a disk that takes nothing costs one line of the log."""
        if not process_group().is_first:
            return
        try:
            self._folder.mkdir(exist_ok=True)
            self._forget(but=step)
            replace_bytes(self.path(step), content)
        except OSError as error:  # nothing that a run needs
            log.warning("%s are not in %s: %s", self._what, self._folder, error)

    def restore(self, step: int, take: Callable[[bytes], None], expected: str) -> str:
        """Hands what was written with the checkpoint of `step` to `take`, in every process. Returns
        a sentence about why it cannot be used, by the ValueError of `take` or without it, with what
        is `expected` and lost. It is empty where all is well."""
        content, why = process_group().agree(self._what, lambda: _content(self.path(step)))
        if content is not None:
            try:
                take(content)
            except ValueError as error:
                why = str(error)
        return why and f"{self.path(step)} {why}: expected {expected}."

    def _forget(self, but: int) -> None:
        """Those whose checkpoint is no longer there."""
        wanted = {self.path(int(path.name)) for path in checkpoints_in(self._checkpoints)}
        for path in {*self._folder.glob("step-*.bin")} - wanted - {self.path(but)}:
            path.unlink()


def as_file(what: str, told: Mapping[str, Any], rest: bytes) -> bytes:
    """The content of a file whose body is a line of JSON, and bytes."""
    return sealed(what, json.dumps(told).encode() + b"\n" + rest)


def of_file(what: str, content: bytes) -> tuple[Any, bytes]:
    """What `as_file` was given. Raises ValueError where a bit of it is another."""
    body = content.partition(b"\n")[2]
    if sealed(what, body) != content:
        raise ValueError(DAMAGED)
    line, _, rest = body.partition(b"\n")
    return parse_json(line), rest


def sealed(what: str, body: bytes) -> bytes:
    """A file's content: one line with what is in it and a checksum of all behind it, and `body`."""
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
