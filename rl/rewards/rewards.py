"""Finds reward functions by name: built-in ones, or the user's from a module or a file.

Knows names. Does not know a function's arguments (`signatures.py`), nor processes or time limits
(`workers.py`), and imports no jax, because reward workers import this module.
"""

import inspect
import re
from collections.abc import Sequence
from itertools import chain, count

from pat_jax.common.errors import UserError
from pat_jax.rl.own_code import module_of
from pat_jax.rl.rewards.built_in import BUILT_IN, MATH, RewardFunction
from pat_jax.rl.rewards.math_value import same_value

MODEL = "model:"  # prefix of a reward model's directory or name on the Hub


def resolve_reward(spec: str) -> RewardFunction:
    """Returns the function that `spec` names.

    Args:
      spec: `exact`, `math`, `math_lenient`, `module:function` or `path/to/file.py:function`. A file
        may also be one that `run/start/sent_code.py` wrote.
    """
    if spec in BUILT_IN:
        if spec in MATH:
            same_value("1/2", "0.5")  # so that imports and grammar take no time of the first call
        return BUILT_IN[spec]
    source, _, name = spec.rpartition(":")
    if not source or not name:
        raise UserError(
            f"option --reward is {spec!r}: expected {', '.join(BUILT_IN)}, module:function, "
            "path/to/file.py:function, http://host:port/path or model:DIR; correct the option."
        )
    module = module_of(source, f"reward {spec!r}")
    function: RewardFunction | None = getattr(module, name, None)
    if not callable(function):
        found = [key for key, value in vars(module).items() if inspect.isfunction(value)]
        raise UserError(
            f"reward {spec!r}: {source} has no function {name!r} (it has {', '.join(found) or 'none'})"
            f": expected one that takes prompts, completions and **columns; correct the name."
        )
    return function


def is_endpoint(spec: str) -> bool:
    """Whether `spec` is an address (`endpoint.py`) and not a function."""
    return spec.lower().startswith(("http://", "https://"))


def model_of(spec: str) -> str:
    """Returns the directory or Hub name of the reward model that `spec` names, or ""."""
    return spec.removeprefix(MODEL) if spec.startswith(MODEL) else ""


def short_names(specs: Sequence[str]) -> list[str]:
    """Returns the rewards' names in metrics: the function's name, or the last part of a path. Equal
    names are numbered."""
    names: list[str] = []
    for spec in specs:
        own = spec.rpartition(":")[2]
        if is_endpoint(spec):
            own = re.split("[?#]", spec)[0].rstrip("/").rpartition("/")[2]
        elif model := model_of(spec):
            own = model.rstrip("/").rpartition("/")[2].partition("@")[0]
        names.append(metric_name(own))
    return numbered(names)


def numbered(names: Sequence[str]) -> list[str]:
    """Returns the names, each made different from those before it by a number where need be."""
    found: list[str] = []
    for name in names:
        others = (f"{name}_{number}" for number in count(2))
        found.append(next(each for each in chain([name], others) if each not in found))
    return found


def metric_name(text: str) -> str:
    """Returns the text with `_` for characters that some readers of metrics do not accept."""
    return re.sub(r"[^\w.-]", "_", text, flags=re.ASCII)
