"""The folders of checkpoints, and whether their files have their sizes and checksums.

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

MANIFEST = "pat_jax_files.json"
METADATA = "meta/metadata"  # a file that every checkpoint has
# Of their bytes, what the arrays of a trained policy take on disk at least. Seen: 0.93 of random numbers,
# 0.79 of a state whose reference is as it was in bfloat16, 0.48 of such numbers alone.
COMPRESSED = 0.45
_PROBE = ".probe-"  # of the name of a folder that is made to see whether one can be
_BLOCK = 1 << 22  # bytes read at once
_THREADS = 4


def checkpoints_in(directory: Path) -> list[Path]:
    """The folders that may be checkpoints, the newest last."""
    if not directory.is_dir():
        return []
    named = [path for path in directory.iterdir() if re.fullmatch("0|[1-9][0-9]*", path.name)]
    return sorted((path for path in named if path.is_dir()), key=lambda path: int(path.name))


def move_aside(path: Path, folder: Path) -> Path:
    """Moves a file or a folder into `folder`, to a name that nothing there has."""
    folder.mkdir(exist_ok=True)
    target, numbers = folder / path.name, itertools.count(1)
    while os.path.lexists(target):
        target = folder / f"{path.name}.{next(numbers)}"
    return path.rename(target)


def lacking(directory: Path, num_bytes: int) -> str:
    """Why nothing can be written, in words. Found here, it is one sentence. A disk that turns out
    full while it is written to costs hundreds of lines of tracebacks. A folder that Orbax cannot
    make leaves its threads waiting, and a process that does not end."""
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
    """Writes down size and CRC-32 of every file of a complete checkpoint."""
    paths = list(_files(checkpoint))
    with ThreadPoolExecutor(_THREADS) as pool:
        sums = list(pool.map(_checksum, paths))
    entries = {
        str(path.relative_to(checkpoint)): [path.stat().st_size, checksum]
        for path, checksum in zip(paths, sums, strict=True)
    }
    replace_text(checkpoint / MANIFEST, json.dumps(entries))


def damage(checkpoint: Path, *, by_checksum: bool = True) -> str | None:
    """What is wrong with the files of a checkpoint; None: nothing. Where some have no checksum
    nobody can tell. Without `by_checksum` their sizes alone are compared."""
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
    """All but what a system or a person leaves in folders, such as `.DS_Store`."""
    for path in sorted(checkpoint.rglob("*")):
        if path.is_file() and path.name != MANIFEST and not path.name.startswith("."):
            yield path


def _checksum(path: Path) -> int:
    value = 0
    with open(path, "rb") as file:
        while block := file.read(_BLOCK):
            value = zlib.crc32(block, value)
    return value
