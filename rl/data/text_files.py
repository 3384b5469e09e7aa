"""Reads plain text files: those that hold neither rows (`row_files.py`) nor a table.

Knows files and their errors. Does not know tokens.
"""

from pathlib import Path

from pat_jax.common.errors import UserError
from pat_jax.rl.data.row_files import MOST_BYTES, RECORD_FORMATS, problem_of

_TABLES = (".csv", ".tsv")


def is_text_file(path: Path) -> bool:
    """Whether a file of this name is read as one text."""
    return path.suffix.lower() not in (*RECORD_FORMATS, *_TABLES)


def read_text_file(path: Path) -> str:
    """Returns the whole file unchanged. Raises UserError if it cannot be read, is too large, or is
    not UTF-8 text."""
    if problem := problem_of(path, (path.suffix.lower(),)):
        raise UserError(f"data file {path} {problem}")
    try:
        if (size := path.stat().st_size) > MOST_BYTES:
            raise UserError(
                f"data file {path} has {size / 2**30:.1f} GiB: expected at most {MOST_BYTES / 2**30:g} GiB, "
                "because the whole file is held in memory; split it."
            )
        data = path.read_bytes()
    except OSError as error:
        raise UserError(
            f"data file {path} cannot be read ({error.strerror or error}): expected a readable file; "
            "check its permissions and its disk."
        ) from None
    try:
        text = data.decode()
        wrong = data.find(b"\0")  # UTF-16 and binary files have zeros
    except UnicodeDecodeError as error:
        text = ""
        wrong = error.start
    if wrong >= 0:
        raise UserError(
            f"data file {path} is not UTF-8 text (byte 0x{data[wrong]:02x} at offset {wrong:,}): expected "
            "plain text; convert the file, or leave it out by a pattern such as 'corpus/**/*.txt'."
        )
    return text
