"""The folder of a run: what lies where, whether a run may write there, and who does.

Knows files and the options that they were written with. Does not know what a run computes.
"""

import logging
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from datetime import datetime
from pathlib import Path
from typing import Any, TypeVar

from filelock import BaseFileLock, FileLock, Timeout

from pat_jax.common.errors import UserError
from pat_jax.common.files import replace_text
from pat_jax.common.printable import printable
from pat_jax.config.any_run import AnyRun
from pat_jax.config.command_line import parse
from pat_jax.run.checkpoints.meta import newest_meta
from pat_jax.run.logging.metrics import METRICS_FILE
from pat_jax.run.logging.rollout_files import ROLLOUTS_FILE
from pat_jax.run.logging.samples import SAMPLES_FILE
from pat_jax.run.results.shown_switch import SWITCH_FILE, SWITCH_PICTURE
from pat_jax.run.start.hub_names import go_on_with_names

CONFIG_FILE, CHECKPOINTS, LOG_FILE, LOCK_FILE = "config.yaml", "checkpoints", "run.log", ".lock"
PAGE_FILE = "run.html"
ROWS = "rows"  # what a program has given in the place of data files (`given_rows.py`)
COMPLETE = "\n...\n"  # the end of a YAML document, and of a config.yaml that was not cut

Options = TypeVar("Options", bound=AnyRun)


def options_of_run(argv: Sequence[str], parse: Callable[..., Options]) -> Options:
    """The options that `argv` asks for; those of a resumed run are its own, unless given again.
    `parse` is as `command_line.parse`, with `only` where the others may need those of the run.
    Raises UserError where they are wrong, or there is no run to resume."""
    argv = _resume_decided(argv, parse)
    resumed = parse(argv, only=("resume", "run_dir"))
    if resumed.resume:
        folder = check_run_dir(resumed)
        go_on_with_names(folder)
        return parse(["--config", str(saved_config(folder)), *argv])
    config = parse(argv)
    if not config.run_dir:
        config = replace(config, run_dir=f"runs/{datetime.now():%Y%m%d-%H%M%S}")
    return config


def _resume_decided(argv: Sequence[str], parse: Callable[..., AnyRun]) -> list[str]:
    """With `--resume auto` made true where the folder has a run, and false where it has none."""
    split = [text.split("=", 1) if text.startswith("--resume=") else [text] for text in argv]
    words = [word for texts in split for word in texts]
    places = [i for i, word in enumerate(words) if word == "--resume"]
    auto = [i + 1 for i in places if words[i + 1 : i + 2] == ["auto"]]
    if not auto:
        return list(argv)
    for i in auto:
        words[i] = "false"
    config = parse(words, only=("run_dir",))
    if not config.run_dir:
        raise UserError(
            "option --resume is 'auto': expected --run_dir with it, the folder of the run to begin or to "
            "continue; give it."
        )
    for i in auto:
        folder = Path(config.run_dir)
        words[i] = "true" if _is_run(folder) and is_used(folder) else "false"
    return words


def _is_run(folder: Path) -> bool:
    return (folder / CONFIG_FILE).exists() or (folder / CHECKPOINTS).is_dir()


def check_run_dir(config: AnyRun) -> Path:
    """The run's folder, if it can be written; not made yet. Raises UserError where it cannot be
    written, holds another run, or has nothing to resume."""
    folder, option = Path(config.run_dir), f"option --run_dir is {config.run_dir!r}"
    existing = folder
    while not os.path.exists(existing):  # False too where looking is forbidden
        existing = existing.parent
    if not existing.is_dir() or not os.access(existing, os.R_OK | os.W_OK | os.X_OK):
        raise UserError(f"{option}: expected a folder that can be written, but {existing} is none.")
    if config.resume and not _is_run(folder):
        raise UserError(f"{option}: expected the folder of a run to resume, with {CONFIG_FILE}.")
    if not config.resume and is_used(folder):
        raise UserError(
            f"{option}: expected a new or empty folder; choose another, or --resume the run in it."
        )
    _check_kinds(folder, option)
    return folder


def is_used(folder: Path) -> bool:
    """By more than what a run has there before it has done anything.

    That is its lock, a file that is just written, its options beside its log, its page, and rows it
    was given. A run that failed then can be begun again in its folder.
    """
    if not folder.is_dir():
        return False
    names = {path.name for path in folder.iterdir() if path.name[0] != "."} - {ROWS, PAGE_FILE}
    # Options without a log were not written by a run: they may be somebody's own.
    return bool(names) and not (names == {CONFIG_FILE, LOG_FILE} and _is_whole(folder))


def _is_whole(folder: Path) -> bool:
    """Whether its options are as a run writes them."""
    try:
        return (folder / CONFIG_FILE).read_text(encoding="utf-8").endswith(COMPLETE)
    except (OSError, UnicodeDecodeError):
        return False


def _check_kinds(folder: Path, option: str) -> None:
    files = [CONFIG_FILE, METRICS_FILE, LOG_FILE, LOCK_FILE, PAGE_FILE, ROLLOUTS_FILE, SAMPLES_FILE]
    for name in (*files, SWITCH_FILE, SWITCH_PICTURE, "rollout.json", "rollout.png"):
        if (folder / name).is_dir():
            raise UserError(f"{option}: expected {name} there to be a file, not a folder; move it.")
    for name in (CHECKPOINTS, ROWS, "tensorboard"):
        if (folder / name).exists() and not (folder / name).is_dir():
            raise UserError(f"{option}: expected {name} there to be a folder, not a file; move it.")


def saved_config(folder: Path) -> Path:
    """The file of the options that a run was begun with, put right if it was damaged. Raises
    UserError where it was damaged, and no checkpoint knows the options."""
    path = folder / CONFIG_FILE
    if _is_whole(folder):
        return path
    meta = newest_meta(folder / CHECKPOINTS)
    if meta is None or "config" not in meta["meta"]:
        raise UserError(
            f"{path} is cut short: expected its last line to be `...`, and no checkpoint knows the "
            "options; write them there again, ending in that line, or begin another run."
        )
    replace_text(path, meta["meta"]["config"])
    return path


def changed_options(config: AnyRun, folder: Path) -> list[str]:
    """Each option of a resumed run that is another than before, such as `seed 0 -> 1`."""
    if not config.resume:
        return []
    before = parse(["--config", str(folder / CONFIG_FILE)], type(config), presets=None)
    changes = differences(_wherever(before), _wherever(config))
    each_start = re.compile(r"run_dir|resume|distributed\..*")
    return [
        f"{name} {old} -> {new}"
        for name, (old, new) in changes.items()
        if not each_start.fullmatch(name)
    ]


def name_of_rows(path: str) -> str:
    """What a file of given rows is called in its run's folder, wherever that lies; empty of any
    other path. It follows from the rows: files of one name have the same."""
    name = "/".join(Path(path).parts[-3:])
    return name if re.fullmatch(rf"{ROWS}/[0-9a-f]{{16}}/\w+\.jsonl", name) else ""


def _wherever(config: AnyRun) -> dict[str, Any]:
    """The options, whose files of given rows are as where the folder was before."""
    options = asdict(config)
    for section, name in (("data", "files"), ("eval", "data")):
        files = options[section][name]
        options[section][name] = tuple(name_of_rows(file) or file for file in files)
    return options


def differences(
    before: Mapping[str, Any], after: Mapping[str, Any]
) -> dict[str, tuple[object, object]]:
    """Options by their names, sections included, that two nested dictionaries have not alike."""
    old, new = _flat(before), _flat(after)
    return {name: (old[name], new[name]) for name in new if old[name] != new[name]}


def _flat(options: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in options.items():
        nested = _flat(value, f"{prefix}{name}.") if isinstance(value, dict) else None
        found |= {f"{prefix}{name}": value} if nested is None else nested
    return found


def make_run_dir(config: AnyRun, folder: Path) -> BaseFileLock:
    """The first thing that a run writes. Returns the lock of the folder, held until it is released
    or the process ends. Raises UserError where the folder cannot be made, or another run writes
    there."""
    option = f"option --run_dir is {config.run_dir!r}"
    lock = lock_folder(folder, option)
    if not config.resume and is_used(folder):
        raise UserError(f"{option}: another process has begun a run there; choose another folder.")
    return lock


def lock_folder(folder: Path, option: str) -> BaseFileLock:
    """Made when missing, and kept from other processes. Raises UserError, which begins with
    `option`, where it cannot be made, or another process holds it."""
    lock = FileLock(folder / LOCK_FILE)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock.acquire(timeout=0)
    except Timeout:
        raise UserError(
            f"{option}: another process is running there; wait for its end, or choose another folder."
        ) from None
    except OSError as error:  # such as /proc, which says that it can be written
        raise UserError(
            f"{option}: expected a folder that can be written ({error.strerror})."
        ) from None
    return lock


class _Printable(logging.Formatter):
    """Of a log that people look at on terminals."""

    def format(self, record: logging.LogRecord) -> str:
        return printable(super().format(record))


def log_to(path: Path) -> None:
    """What the package logs goes to this file, and nowhere else."""
    handler = logging.FileHandler(path, encoding="utf-8")
    handler.setFormatter(_Printable("%(asctime)s %(name)s: %(message)s"))
    package = logging.getLogger("pat_jax")
    package.addHandler(handler)
    package.setLevel(logging.INFO)
    package.propagate = False
    logging.raiseExceptions = False  # a full disk costs lines of the log, not a traceback for each
