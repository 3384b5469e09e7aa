"""Writes rows that a program gives instead of data files into the folder of a run or evaluation.

So a resumed run finds them, even from a shell. Does not know what columns mean.
"""

import hashlib
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from pat_jax.common.errors import UserError, shown
from pat_jax.common.files import replace_bytes
from pat_jax.common.given_json import json_line
from pat_jax.common.hosts.together import process_group
from pat_jax.config.from_python import Config, words
from pat_jax.run.files.folder import CONFIG_FILE, ROWS, name_of_rows

# The file of rows to evaluate on. It also names their set in metrics and results.
HELDOUT_FILE = "heldout.jsonl"
_SECTIONS = ("data", "eval")
Paths = Callable[[Sequence[str]], tuple[str, ...]]


class GivenRows:
    """The given rows of one run, by file name. A name contains a checksum of the rows.

    Args:
      data_file: the name of the file of `data`.
    """

    def __init__(self, data_file: str = "data.jsonl") -> None:
        self._rows: dict[str, tuple[str, bytes]] = {}  # the label in messages, and the content
        self._placed: dict[str, Path] = {}
        # Options that can have rows, and the names of their files.
        self._names = {"data": data_file, "data.files": data_file, "files": data_file}
        self._names["eval.data"] = HELDOUT_FILE

    def words(
        self, config: Config, options: Mapping[str, Any], config_class: type, presets: Path | None
    ) -> list[str]:
        """Returns `from_python.words` of options with the rows taken out."""
        own = self.taken_from(config) if isinstance(config, Mapping) else config
        return words(own, self.taken_from(options), config_class, presets)

    def taken_from(self, options: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
        """Takes the rows out of the options. Returns the options with file names in their place.
        Raises UserError if an option has neither file names nor rows, or if JSON cannot hold a
        row."""
        found: dict[str, Any] = {}
        for key, value in options.items():
            name = f"{prefix}{key}"
            if name in _SECTIONS and isinstance(value, Mapping):
                _check_section(name, value)
                found[key] = self.taken_from(value, f"{name}.")
            elif name in self._names and not _are_names(name, value):
                found[key] = self._add(name, _content(name, value))
            else:
                found[key] = value
        return found

    def _add(self, option: str, content: bytes) -> str:
        folder = hashlib.sha256(content).hexdigest()[:16]
        name = f"{ROWS}/{folder}/{self._names[option]}"
        self._rows[name] = f"{option}=[...]", content
        return name

    @contextmanager
    def placed(self, run_dir: str, names: Sequence[str]) -> Iterator[Paths]:
        """Writes the rows whose file names are among `names` into the run's folder. Yields a
        function that returns the paths of such names: the folder may have been moved. On exit,
        removes the rows if no run has begun there. A UserError raised inside names the rows instead
        of the file."""
        run = Path(run_dir).absolute()
        files = self._placed = {name: run / name for name in names if name in self._rows}

        def paths(names: Sequence[str]) -> tuple[str, ...]:
            return tuple(str(files.get(name) or _here(name, run)) for name in names)

        existed = run.exists()
        new = [path for path in files.values() if not path.exists()]
        try:
            process_group().agree("rows", lambda: self._write(files))
            yield paths
        except UserError as error:
            sentence = self._worded(str(error), files)
            if sentence == str(error):
                raise
            raise UserError(sentence) from error
        finally:
            if process_group().is_first:
                _remove_unused(run, new, existed=existed)

    def keep(self) -> None:
        """Writes placed files again that are missing. Called once this process has locked the
        folder: another process with the same rows may have failed and removed them."""
        self._write({name: path for name, path in self._placed.items() if not path.is_file()})

    def _write(self, files: Mapping[str, Path]) -> None:
        for name, path in files.items():
            path.parent.mkdir(parents=True, exist_ok=True)
            replace_bytes(path, self._rows[name][1])

    def _worded(self, sentence: str, files: Mapping[str, Path]) -> str:
        for name, path in files.items():
            label, _ = self._rows[name]
            sentence = sentence.replace(f"{path}, line ", f"{label}, row ")
            sentence = sentence.replace(str(path), label)
        return sentence


def _here(name: str, run: Path) -> str:
    own = name_of_rows(name)
    return str(run / own) if own and (run / own).is_file() else name


def _remove_unused(run: Path, files: Iterable[Path], *, existed: bool) -> None:
    """Removes the files and folders that are then empty, unless a run has begun in the folder. One
    that is just beginning there writes its rows again (`GivenRows.keep`)."""
    for path in () if (run / CONFIG_FILE).exists() else files:
        with suppress(OSError):
            path.unlink(missing_ok=True)
            path.parent.rmdir()
            path.parent.parent.rmdir()
            if not existed:
                run.rmdir()


def _check_section(name: str, value: Mapping[str, Any]) -> None:
    """Raises UserError for a DatasetDict, which has all splits of a dataset."""
    if hasattr(value, "column_names"):
        kind = type(value).__name__
        splits = ", ".join(map(str, value))
        raise UserError(
            f"{name} is a {kind} of the splits {splits}: expected one of them; give it, "
            f"such as {name}=dataset['train']."
        )


def _are_names(option: str, value: object) -> bool:
    """Returns whether the value is a file name, a list of them, or None. For eval.data the list may
    be empty, as config.yaml has it."""
    if isinstance(value, list | tuple):
        may_be = bool(value) or option == "eval.data"  # without data there is no run
        return may_be and all(isinstance(each, str | os.PathLike) for each in value)
    return value is None or isinstance(value, str | os.PathLike)


def _content(option: str, rows: Any) -> bytes:
    """Returns the rows as JSON lines. Raises UserError if they are no rows, or if JSON cannot hold
    one."""
    try:
        if isinstance(rows, bytes | Mapping):
            raise TypeError
        count, each = len(rows), iter(rows)
    except TypeError:
        raise UserError(
            f"{option} is {shown(rows)}: expected names of files, or rows: a list of dictionaries, "
            "a datasets.Dataset, or what else has a length and goes through them; put those of a "
            "generator into a list."
        ) from None
    if not count:
        raise UserError(f"{option} is {shown(rows)}: expected at least one row; give some.")
    numbered = zip(range(1, count + 1), each, strict=False)  # the iterator may have no end
    return "".join(
        json_line(f"{option}=[...], row {number}", row) for number, row in numbered
    ).encode()
