"""A file of JSON lines that a killed command can go on with: whole lines, in order, none lost."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

from pat_jax.common.errors import UserError

T = TypeVar("T")


class ResultFile:
    """Appends results; what a kill left half written is cut off when it goes on."""

    def __init__(self, path: Path, *, resume: bool):
        """
        Raises:
          UserError: the file cannot be written, or has results and is not to be resumed.
        """
        self.path = path
        content = self._try(lambda: path.read_bytes() if path.exists() else b"")
        whole = content[: content.rfind(b"\n") + 1]
        if content and not resume:
            raise UserError(
                f"option --out is {str(path)!r}: the file has {whole.count(10)} results; go on after "
                "them with --resume, or choose another."
            )
        self.done = [self._place(i, line) for i, line in enumerate(whole.splitlines(), start=1)]
        self._try(lambda: path.parent.mkdir(parents=True, exist_ok=True))
        self._file = self._try(lambda: path.open("ab"))
        self._file.truncate(len(whole))

    def _try(self, use: Callable[[], T]) -> T:
        try:
            return use()
        except OSError as error:
            raise UserError(
                f"option --out is {str(self.path)!r}: the file cannot be written "
                f"({error.strerror}); expected one in a folder that you may write to."
            ) from None

    def _place(self, number: int, line: bytes) -> tuple[int, int]:
        try:
            record = json.loads(line)
            return record["line"], record["sample"]
        except (ValueError, TypeError, KeyError):
            raise UserError(
                f"{self.path}, line {number}, is no result of this command: expected an object with "
                "line and sample; choose another --out."
            ) from None

    def check(self, index: int, line: int, sample: int) -> None:
        """Refuses to go on where result `index` belongs to another sample than the one that is due there."""
        if self.done[index] != (line, sample):
            was = "line {}, sample {}".format(*self.done[index])
            raise UserError(
                f"{self.path}, line {index + 1}, is the result of {was} of other prompts: expected "
                f"line {line}, sample {sample}; choose another --out."
            )

    def write(self, record: Mapping[str, Any]) -> None:
        """One line, out of the process's hands when this returns."""
        self._file.write(
            json.dumps(record, ensure_ascii=False).encode("utf-8", "backslashreplace") + b"\n"
        )
        self._file.flush()

    def __enter__(self) -> "ResultFile":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._file.close()
