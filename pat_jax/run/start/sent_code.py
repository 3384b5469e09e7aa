"""Writes reward functions and losses of a running program, such as a notebook's cell, to files.

Processes of their own score responses, so that a function that hangs costs one reward and not the
run. They cannot import what was typed into a cell. So cloudpickle sends them the function by value,
with the present values that it refers to. What it changes there does not change here. A loss is
written in the same way, so that a resumed run has it without the program.
"""

import hashlib
import re
from pathlib import Path
from typing import Any

import cloudpickle

from pat_jax.common.devices import CACHE_DIR
from pat_jax.common.errors import UserError, shown
from pat_jax.rl.algorithm.losses import Loss
from pat_jax.rl.own_code import SENT_LOSS, SENT_REWARD
from pat_jax.rl.rewards.rewards import metric_name
from pat_jax.training.own_loss import LOSSES

REWARDS = CACHE_DIR.parent / "rewards"  # folder of the functions that this user's programs sent
# The number of a class that is pickled by value: the length of a text, and 32 random digits.
_CLASS_NUMBER = re.compile(rb"\x8c\x20[0-9a-f]{32}")


def send_reward(function: object, folder: Path = REWARDS) -> str:
    """Writes a reward function to a file in `folder`, named by its content. Returns the function's
    name for `--reward`, by which a resumed run and later runs find it. Raises UserError if the
    function refers to something that cannot be pickled, or if the file cannot be written."""
    return _sent(function, folder, SENT_REWARD, "reward", "the processes that score")


def send_loss(loss: object, folder: Path = LOSSES) -> str:
    """As `send_reward`, for a loss or its class, and `--algorithm.loss`."""
    return _sent(loss, folder, SENT_LOSS, "loss", "a resumed run")


def rewards_of(reward: object) -> list[str]:
    """Returns the value of `--reward`. Functions are written to files, which the processes that
    score read. Raises UserError if one is neither a function nor a text, or cannot be written."""
    found: list[Any] = list(reward) if isinstance(reward, list | tuple) else [reward]
    if not found or not all(isinstance(each, str) or callable(each) for each in found):
        raise UserError(
            f"reward is {shown(reward)}: expected a function, what --reward names, or a list of them; give one."
        )
    return [send_reward(each) if callable(each) else each for each in found]


def loss_of(loss: object) -> str:
    """Returns the value of `--algorithm.loss`. A loss, or its class, is written to a file, which a
    resumed run reads. Raises UserError if `loss` is neither a loss, its class nor a text, or if it
    cannot be written."""
    if isinstance(loss, str):
        return loss
    if isinstance(loss, Loss) or (isinstance(loss, type) and issubclass(loss, Loss)):
        return send_loss(loss)
    raise UserError(
        f"loss is {shown(loss)}: expected an object of a class derived from pat_jax.rl.algorithm.losses.Loss, "
        "which names the columns that it reads and the metrics that it gives beside computing them; "
        "write a function as the method `values` of such a class, as examples/loss.py does."
    )


def _sent(value: object, folder: Path, suffix: str, what: str, readers: str) -> str:
    name = _name(value, what)
    try:
        content = cloudpickle.dumps({name: value})
    # Each object that the value refers to may fail in its own way.
    except Exception as error:
        raise UserError(
            f"{what} {name!r} cannot be sent to {readers} ({error}): expected one that refers to plain values "
            "and modules; have it open files, clients and locks itself."
        ) from error
    # The processes of one program name equal content alike.
    number = hashlib.sha256(_CLASS_NUMBER.sub(b"", content)).hexdigest()[:16]
    path = folder / f"{number}{suffix}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    except OSError as error:
        raise UserError(
            f"{what} {name!r} cannot be written to {path} ({error.strerror}): make room, or set PAT_JAX_CACHE "
            "to a folder that can be written."
        ) from None
    return f"{path}:{name}"


def _name(value: object, what: str) -> str:
    """Returns the value's name as metrics use it, or `what` if it has none."""
    name = getattr(value, "__name__", type(value).__name__)
    return metric_name(name) if re.search(r"\w", name) and "<" not in name else what
