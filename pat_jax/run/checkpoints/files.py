"""The folders of checkpoints: finds them, seals their files with checksums, and detects damage.

Knows files and bytes. Does not know what is in them (`checkpoint.py`).
"""

import itertools
import json
import os
import re
import shutil
import tempfile
import zlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from pat_jax.common.files import replace_text
from pat_jax.common.json_text import parse_json

CHECKPOINTS = "checkpoints"  # in the folder of a run
JOURNAL = "unfinished"  # there, and in that of an evaluation: responses (`journal.py`)
MANIFEST = "pat_jax_files.json"
METADATA = "meta/metadata"  # a file that every checkpoint has
# The least share of its bytes that a trained policy takes on disk. Seen: 0.93 for random numbers,
# 0.79 for a state whose reference came from bfloat16, 0.48 for such numbers alone.
COMPRESSED = 0.45
_PROBE = ".probe-"  # prefix of a folder that is created to see whether one can be
_BLOCK = 1 << 22  # bytes read at once
_THREADS = 4


def checkpoints_in(directory: Path) -> list[Path]:
    """Returns the folders that may be checkpoints, the newest last."""
    if not directory.is_dir():
        return []
    named = [path for path in directory.iterdir() if re.fullmatch("0|[1-9][0-9]*", path.name)]
    return sorted((path for path in named if path.is_dir()), key=lambda path: int(path.name))


def move_aside(path: Path, folder: Path) -> Path:
    """Moves a file or a folder into `folder`, under a name that is free. Returns its new path."""
    folder.mkdir(exist_ok=True)
    target = folder / path.name
    numbers = itertools.count(1)
    while os.path.lexists(target):
        target = folder / f"{path.name}.{next(numbers)}"
    return path.rename(target)


def lacking(directory: Path, num_bytes: int) -> str:
    """Returns why `num_bytes` cannot be written, or "". Checking first keeps the error short: Orbax
    prints hundreds of lines if the disk fills up while it writes. If it cannot create a folder, its
    threads wait forever and the process does not end."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=_PROBE, dir=directory):
            free = shutil.disk_usage(directory).free
    except OSError as error:
        return str(error.strerror)
    if free >= COMPRESSED * num_bytes:
        return ""
    return f"it takes {num_bytes / 2**20:,.1f} MiB, of which {free / 2**20:,.1f} are free"


def seal(checkpoint: Path) -> None:
    """Writes the size and CRC-32 of every file of a complete checkpoint into its manifest."""
    paths = list(_files(checkpoint))
    with ThreadPoolExecutor(_THREADS) as pool:
        sums = list(pool.map(_checksum, paths))
    entries = {
        str(path.relative_to(checkpoint)): [path.stat().st_size, checksum]
        for path, checksum in zip(paths, sums, strict=True)
    }
    replace_text(checkpoint / MANIFEST, json.dumps(entries))


def damage(checkpoint: Path, *, by_checksum: bool = True) -> str | None:
    """Returns what is wrong with the files of a checkpoint, or None. A file without a checksum
    counts as damage. Without `by_checksum`, only sizes are compared."""
    if not (checkpoint / MANIFEST).is_file():
        return f"it has no {MANIFEST}, so that nobody can tell whether its files are as they were written"
    try:
        entries: Any = parse_json((checkpoint / MANIFEST).read_bytes())
        wanted = {name: (int(size), int(checksum)) for name, (size, checksum) in entries.items()}
    except (OSError, ValueError, TypeError, AttributeError, OverflowError):
        return f"{MANIFEST} cannot be read"
    there = {str(path.relative_to(checkpoint)) for path in _files(checkpoint)}
    if unlisted := sorted((there | {METADATA}) - wanted.keys()):
        return f"{unlisted[0]} has no checksum in {MANIFEST}"
    for name, (size, _) in wanted.items():
        path = checkpoint / name
        if not path.is_file():
            return f"{name} is missing"
        if (found := path.stat().st_size) != size:
            return f"{name} has {found:,} of {size:,} bytes"
    if not by_checksum:
        return None
    with ThreadPoolExecutor(_THREADS) as pool:
        found = pool.map(_checksum, [checkpoint / name for name in wanted])
        for (name, (_, checksum)), actual in zip(wanted.items(), found, strict=True):
            if actual != checksum:
                return f"{name} has another checksum than when it was written"
    return None


def _files(checkpoint: Path) -> Iterator[Path]:
    """Yields all files except hidden ones, such as `.DS_Store`, and the manifest."""
    for path in sorted(checkpoint.rglob("*")):
        if path.is_file() and path.name != MANIFEST and not path.name.startswith("."):
            yield path


def _checksum(path: Path) -> int:
    value = 0
    with open(path, "rb") as file:
        while block := file.read(_BLOCK):
            value = zlib.crc32(block, value)
    return value
