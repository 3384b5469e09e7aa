"""The file of results in JSON lines. If a command is killed, another one can continue the file."""

import json
from functools import partial
from pathlib import Path
from typing import IO, Any, Self

from pat_jax.common.errors import UserError
from pat_jax.common.files import whole_lines
from pat_jax.common.hosts.together import process_group
from pat_jax.common.json_text import parse_json


class ResultFile:
    """Appends results to a file, or keeps them in memory if there is none. On resume it removes a
    line that a kill left half written.

    If there are several processes, the first one writes.
    """

    def __init__(self, path: Path | None, *, resume: bool):
        """Raises UserError if the file cannot be written, or has results and `resume` is False."""
        self.path = path
        self._file: IO[bytes] | None = None
        self._kept: list[dict[str, Any]] = []  # without a file
        self.done: list[tuple[int, int]] = []
        if path is not None:
            open_file = partial(self._open, path, resume=resume)
            self.done = process_group().agree("results before", open_file)

    def _open(self, path: Path, *, resume: bool) -> list[tuple[int, int]]:
        """Opens the file; returns the prompt's line and the sample of each result in it."""
        option = f"option --out is {str(path)!r}"
        try:
            if path.exists() and not path.is_file():
                raise UserError(
                    f"{option}: expected a file, and it is a folder, a device or a pipe; choose another."
                )
            whole = whole_lines(path)
            if not resume and path.exists() and path.stat().st_size:
                raise UserError(
                    f"{option}: the file has {whole.count(10)} results; go on after them with "
                    "--resume, or choose another."
                )
            done = [self._place(i, line) for i, line in enumerate(whole.splitlines(), start=1)]
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = path.open("ab")
            self._file.truncate(len(whole))
        except OSError as error:
            raise UserError(
                f"{option}: the file cannot be written ({error.strerror}); expected one in a folder "
                "that you may write to."
            ) from None
        return done

    def _place(self, number: int, line: bytes) -> tuple[int, int]:
        try:
            record: Any = parse_json(line)
            place = record["line"], record["sample"]
            if any(type(number) is not int for number in place):
                raise ValueError
            return place
        except (ValueError, TypeError, KeyError):
            raise UserError(
                f"{self.path}, line {number}, is no result of this command: expected an object with "
                "line and sample; choose another --out."
            ) from None

    def check(self, index: int, line: int, sample: int) -> None:
        """Raises UserError if result `index` in the file is not of this prompt line and sample."""
        if self.done[index] != (line, sample):
            was = "line {}, sample {}".format(*self.done[index])
            raise UserError(
                f"{self.path}, line {index + 1}, is the result of {was} of other prompts: expected "
                f"line {line}, sample {sample}; choose another --out."
            )

    def read(self) -> list[dict[str, Any]]:
        """Returns all results."""
        if (path := self.path) is None:
            return self._kept
        text = process_group().agree("results", path.read_bytes)  # the first process writes
        return [json.loads(line) for line in text.splitlines()]

    def write(self, record: dict[str, Any]) -> None:
        """Appends one result as a line, and flushes it to the operating system."""
        if self.path is None:
            self._kept.append(record)
        if self._file is None:
            return
        self._file.write(
            json.dumps(record, ensure_ascii=False).encode("utf-8", "backslashreplace") + b"\n"
        )
        self._file.flush()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        if self._file is not None:
            self._file.close()
