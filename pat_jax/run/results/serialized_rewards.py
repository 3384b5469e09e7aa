"""Reward functions of a program that is running, such as one of a notebook's cell: into a file.

The processes that score cannot import what was typed into a cell, and there a function that hangs
costs one response its reward and not the run. So it goes to them by value, as cloudpickle writes
it: with what it has closed over as that is now. What it changes there is not changed here.
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

REWARDS = CACHE_DIR.parent / "rewards"  # where those lie that this user's programs have sent


def check_shipped(rewards: Iterable[str]) -> None:
    """Raises UserError where a reward is in a file that no program of this user has written: such a
    file is code, and the folder of a run may name one that came with it."""
    for spec in rewards:
        path = Path(spec.rpartition(":")[0])
        if path.suffix == PICKLED and path.absolute().parent != REWARDS.absolute():
            raise UserError(
                f"option --reward is {shown(spec)}: expected a function that a program of yours has sent to "
                f"{REWARDS}, as unpickling such a file runs code; give the function itself as --reward "
                "path/to/file.py:function, or to pat_jax.train(reward=...)."
            )


def ship(function: Callable[..., Any], folder: Path) -> str:
    """Writes a function to a file in `folder`, one for each content. Returns what `--reward` calls
    it: later runs, and this one when it is resumed, find it by that. Raises UserError where it
    holds on to something that no other process can have, or cannot be written."""
    name = _name(function)
    try:
        content = cloudpickle.dumps({name: function})
    # Anything that it refers to may refuse in its own way.
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
    """Its own name where it has one that metrics can have."""
    name = getattr(function, "__name__", type(function).__name__)
    return metric_name(name) if re.search(r"\w", name) and "<" not in name else "reward"
