"""Keeps the commits of Hub names in a run's folder, so that a resumed run uses the same ones.

Knows one file. Does not know which options have names.
"""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pat_jax.common import hub
from pat_jax.common.files import replace_text
from pat_jax.run.checkpoints.json_state import gone_on_with, read_kept

NAMES_FILE = ".hub.json"  # hidden: `folder.is_used` ignores it


def keep_names(folder: Path) -> None:
    """Writes the commits of all names that this process has found on the Hub."""
    if found := hub.commits():
        replace_text(folder / NAMES_FILE, f"{json.dumps(found)}\n")


def go_on_with_names(folder: Path) -> None:
    """Makes this process use the commits that the run in `folder` has kept."""
    hub.go_on_with(gone_on_with(_read, folder, "commits of the Hub"))


def _read(folder: Path) -> Mapping[str, Mapping[str, str]]:
    expected = "commits of models and datasets by their names"
    return read_kept(folder / NAMES_FILE, expected, _commits, {})


def _commits(content: Any) -> Mapping[str, Mapping[str, str]]:
    for kind in content.values():
        for commit in kind.values():
            if not re.fullmatch(r"[0-9a-f]{40}", commit):
                raise ValueError("a commit is none")
    return content
