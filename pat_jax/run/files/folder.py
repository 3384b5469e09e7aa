"""The folder of a run: its files, whether a run may write there, and its lock.

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

from pat_jax.common.errors import UserError, UserErrors, printable
from pat_jax.common.files import replace_text
from pat_jax.config.any_run import AnyRun
from pat_jax.config.command_line import parse
from pat_jax.config.run import RunConfig
from pat_jax.run.checkpoints.files import CHECKPOINTS
from pat_jax.run.checkpoints.meta import check_fingerprint, newest_meta
from pat_jax.run.files.asked_again import ASKED, check_asked
from pat_jax.run.files.hub_names import go_on_with_names

CONFIG_FILE = "config.yaml"
LOG_FILE = "run.log"
PAGE_FILE = "run.html"
LOCK_FILE = ".lock"
METRICS_FILE = "metrics.jsonl"
ROLLOUTS_FILE = "rollouts.json"
SAMPLES_FILE = "samples.json"
ROWS = "rows"  # folder of rows that a program gave instead of data files (`given_rows.py`)
COMPLETE = "\n...\n"  # the end of a YAML document, and of a config.yaml that was not cut

Options = TypeVar("Options", bound=AnyRun)


def options_of_run(argv: Sequence[str], parse: Callable[..., Options]) -> Options:
    """Returns the options that `argv` asks for. A resumed run keeps its options unless they are
    given again. `parse` has the interface of `command_line.parse`. Raises UserError if an option is
    wrong, or if there is no run to resume."""
    argv = _resume_decided(argv, parse)
    resumed = parse(argv, only=("resume", "run_dir"))
    if resumed.resume:
        folder = check_run_dir(resumed.run_dir, is_resumed=True)
        go_on_with_names(folder)
        saved = str(saved_config(folder))
        try:
            config = parse(["--config", saved, *argv])
        except UserErrors as error:  # of the file: argv alone was read before
            raise UserError(
                f"{saved} has {len(error.errors)} names that are no options of this command: expected a run that "
                f"the same command began; resume it with the other one. The first: {error.errors[0]}"
            ) from None
        if isinstance(config, RunConfig):  # alone, a reward of none has nothing to train on
            given = parse([*argv, "--train=false"], only=(*ASKED, "train"))
            check_asked(config, given, folder)
        return config
    config = parse(argv)
    if not config.run_dir:
        config = replace(config, run_dir=f"runs/{datetime.now():%Y%m%d-%H%M%S}")
    return config


def _resume_decided(argv: Sequence[str], parse: Callable[..., Options]) -> list[str]:
    """Replaces `--resume auto` by true if the folder has a run, and by false if it has none."""
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


def check_run_dir(run_dir: str, *, is_resumed: bool) -> Path:
    """Returns the run's folder, without creating it. Raises UserError if it cannot be written,
    holds another run, or has nothing to resume."""
    folder = Path(run_dir)
    option = f"option --run_dir is {run_dir!r}"
    existing = folder
    while not os.path.exists(existing):  # also False without permission to look
        existing = existing.parent
    if not existing.is_dir() or not os.access(existing, os.R_OK | os.W_OK | os.X_OK):
        raise UserError(f"{option}: expected a folder that can be written, but {existing} is none.")
    if is_resumed and not _is_run(folder):
        raise UserError(f"{option}: expected the folder of a run to resume, with {CONFIG_FILE}.")
    if not is_resumed and is_used(folder):
        raise UserError(
            f"{option}: expected a new or empty folder; choose another, or --resume the run in it."
        )
    _check_kinds(folder, option)
    return folder


def is_used(folder: Path) -> bool:
    """Returns whether the folder has more than a run writes before its first step.

    A run first writes its lock, its options and log, its page, and the rows that it was given. If
    it failed by then, it can be begun again in its folder.
    """
    if not folder.is_dir():
        return False
    names = {path.name for path in folder.iterdir() if path.name[0] != "."} - {ROWS, PAGE_FILE}
    # Options without a log were not written by a run: they may be somebody's own.
    return bool(names) and not (names == {CONFIG_FILE, LOG_FILE} and _is_whole(folder))


def _is_whole(folder: Path) -> bool:
    """Returns whether the file of the run's options is complete."""
    try:
        path = folder / CONFIG_FILE
        return path.is_file() and path.read_text(encoding="utf-8").endswith(COMPLETE)
    except (OSError, UnicodeDecodeError):
        return False


def _check_kinds(folder: Path, option: str) -> None:
    """Raises UserError if something in the folder is of another kind than a run writes: opening a
    FIFO waits for ever, and a device never ends."""
    for inner, _, names in os.walk(folder):
        for path in (os.path.join(inner, name) for name in names):
            if os.path.exists(path) and not (os.path.isfile(path) or os.path.isdir(path)):
                raise UserError(
                    f"{option}: expected files and folders there, but {os.path.relpath(path, folder)} is neither (a "
                    "FIFO, a socket or a device); move it."
                )
    files = [CONFIG_FILE, METRICS_FILE, LOG_FILE, LOCK_FILE, PAGE_FILE, ROLLOUTS_FILE, SAMPLES_FILE]
    pictures = [f"{name}.{kind}" for name in ("rollout", "iteration") for kind in ("json", "png")]
    for name in (*files, *pictures):
        if (folder / name).is_dir():
            raise UserError(f"{option}: expected {name} there to be a file, not a folder; move it.")
    for name in (CHECKPOINTS, ROWS, "tensorboard"):
        if (folder / name).exists() and not (folder / name).is_dir():
            raise UserError(f"{option}: expected {name} there to be a folder, not a file; move it.")


def saved_config(folder: Path) -> Path:
    """Returns the file of the options that a run was begun with. If it is damaged, restores it from
    a checkpoint. Raises UserError if no checkpoint has the options."""
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
    """Returns each option that a resumed run changes, such as `seed 0 -> 1`."""
    if not config.resume:
        return []
    before = parse(["--config", str(folder / CONFIG_FILE)], type(config), presets=None)
    changes = differences(relative_rows(asdict(before)), relative_rows(asdict(config)))
    each_start = re.compile(r"run_dir|resume|distributed\..*")
    return [
        f"{name} {old} -> {new}"
        for name, (old, new) in changes.items()
        if not each_start.fullmatch(name)
    ]


def check_resumed(config: AnyRun, fingerprint: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns the run's fingerprint, with the optimizer's data type added. Raises UserError if a
    resumed run's newest checkpoint has another fingerprint."""
    fingerprint = {**fingerprint, "optimizer.moment_dtype": config.optimizer.moment_dtype}
    if config.resume:
        folder = Path(config.run_dir)
        check_fingerprint(folder / CHECKPOINTS, fingerprint, changed_options(config, folder))
    return fingerprint


def name_of_rows(path: str) -> str:
    """Returns the name of a file of given rows inside its run's folder, or "" for any other path.
    It contains a checksum of the rows: files with the same name have the same rows."""
    name = "/".join(Path(path).parts[-3:])
    return name if re.fullmatch(rf"{ROWS}/[0-9a-f]{{16}}/\w+\.jsonl", name) else ""


def relative_rows(options: dict[str, Any]) -> dict[str, Any]:
    """Returns the options with files of given rows named relative to the run's folder."""
    for section, name in (("data", "files"), ("eval", "data")):
        if files := options.get(section, {}).get(name):
            options[section][name] = tuple(name_of_rows(file) or file for file in files)
    return options


def differences(
    before: Mapping[str, Any], after: Mapping[str, Any]
) -> dict[str, tuple[object, object]]:
    """Returns the old and new values of options that differ, by dotted name."""
    old, new = flat(before), flat(after)
    return {name: (old[name], new[name]) for name in new if old[name] != new[name]}


def flat(options: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Returns options by dotted name."""
    found: dict[str, Any] = {}
    for name, value in options.items():
        nested = flat(value, f"{prefix}{name}.") if isinstance(value, dict) else None
        found |= {f"{prefix}{name}": value} if nested is None else nested
    return found


def make_run_dir(run_dir: str, *, is_resumed: bool) -> BaseFileLock:
    """Creates and locks the folder, before anything else is written. Returns the lock, which is
    held until it is released or the process ends. Raises UserError if the folder cannot be created,
    or if another run writes there."""
    folder = Path(run_dir)
    option = f"option --run_dir is {run_dir!r}"
    lock = lock_folder(folder, option)
    if not is_resumed and is_used(folder):
        raise UserError(f"{option}: another process has begun a run there; choose another folder.")
    return lock


def lock_folder(folder: Path, option: str) -> BaseFileLock:
    """Creates a missing folder, and locks it. Raises UserError, beginning with `option`, if the
    folder cannot be created or another process holds its lock."""
    _check_kinds(folder, option)
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
    """Escapes control characters, as logs are read on terminals."""

    def format(self, record: logging.LogRecord) -> str:
        return printable(super().format(record))


def log_to(path: Path) -> None:
    """Makes the package log to this file only."""
    handler = logging.FileHandler(path, encoding="utf-8")
    handler.setFormatter(_Printable("%(asctime)s %(name)s: %(message)s"))
    package = logging.getLogger("pat_jax")
    package.addHandler(handler)
    package.setLevel(logging.INFO)
    package.propagate = False
    logging.raiseExceptions = False  # a full disk costs lines of the log, not a traceback for each
