"""Writes reward functions of a running program, such as a notebook's cell, to files.

Processes of their own score responses, so that a function that hangs costs one reward and not the
run. They cannot import what was typed into a cell. So cloudpickle sends them the function by value,
with the present values that it refers to. What it changes there does not change here.
"""

import hashlib
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import cloudpickle

from pat_jax.common.devices import CACHE_DIR
from pat_jax.common.errors import UserError, shown
from pat_jax.rl.rewards.rewards import PICKLED, metric_name

REWARDS = CACHE_DIR.parent / "rewards"  # folder of the functions that this user's programs sent


def check_shipped(rewards: Iterable[str]) -> None:
    """Raises UserError if a reward is in a pickle that was not written by a program of this user.
    Such a file is code, and a folder from somebody else may name one that came with it."""
    for spec in rewards:
        path = Path(spec.rpartition(":")[0])
        if path.suffix == PICKLED and path.absolute().parent != REWARDS.absolute():
            raise UserError(
                f"option --reward is {shown(spec)}: expected a function that a program of yours has sent to "
                f"{REWARDS}, as unpickling such a file runs code; give the function itself as --reward "
                "path/to/file.py:function, or to pat_jax.train(reward=...)."
            )


def ship(function: Callable[..., Any], folder: Path) -> str:
    """Writes a function to a file in `folder`, named by its content. Returns its name for
    `--reward`, by which this run, when resumed, and later runs find it. Raises UserError if the
    function refers to something that cannot be pickled, or if the file cannot be written."""
    name = _name(function)
    try:
        content = cloudpickle.dumps({name: function})
    # Each object that the function refers to may fail in its own way.
    except Exception as error:
        raise UserError(
            f"reward {name!r} cannot be sent to the processes that score ({error}): expected a function that "
            "refers to plain values and modules; have it open files, clients and locks itself."
        ) from error
    path = folder / f"{hashlib.sha256(content).hexdigest()[:16]}{PICKLED}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    except OSError as error:
        raise UserError(
            f"reward {name!r} cannot be written to {path} ({error.strerror}): make room, or set PAT_JAX_CACHE "
            "to a folder that can be written."
        ) from None
    return f"{path}:{name}"


def _name(function: Callable[..., Any]) -> str:
    """Returns the function's name as metrics use it, or "reward" if it has none."""
    name = getattr(function, "__name__", type(function).__name__)
    return metric_name(name) if re.search(r"\w", name) and "<" not in name else "reward"
