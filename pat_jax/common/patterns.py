"""Finds files by a pattern, within a time limit: `/**` would be the whole machine."""

import subprocess
import sys

from pat_jax.common.errors import UserError, shown

SECONDS = 20.0
MOST_FILES = 100_000
# A process can be killed while it reads a folder of a million files, or waits for a dead disk.
_PROGRAM = """
import glob, itertools, sys
for name in itertools.islice(glob.iglob(sys.argv[1], recursive=True), int(sys.argv[2])):
    sys.stdout.buffer.write(name.encode("utf-8", "surrogateescape") + b"\\0")
"""


def matches(pattern: str, option: str) -> list[str]:
    """Returns the paths that match the pattern, sorted. Raises UserError, which names `option`, if
    that takes too long, or if there are more than MOST_FILES."""
    command = [sys.executable, "-I", "-S", "-c", _PROGRAM, pattern, str(MOST_FILES + 1)]
    try:
        found = subprocess.run(command, stdout=subprocess.PIPE, timeout=SECONDS, check=True).stdout
    except subprocess.TimeoutExpired:
        raise _too_wide(option, pattern, f"looking took {SECONDS:g} s") from None
    except (subprocess.CalledProcessError, OSError):  # such as for a pattern longer than any path
        return []
    names = sorted(found.decode("utf-8", "surrogateescape").split("\0")[:-1])
    if len(names) > MOST_FILES:
        raise _too_wide(option, pattern, f"it has more than {MOST_FILES:,} files")
    return names


def _too_wide(option: str, pattern: str, why: str) -> UserError:
    return UserError(
        f"option --{option} is {shown(pattern)}: expected a pattern of some files, but {why}; name the folder that "
        "they are in."
    )
