"""Finds reward functions by name: built-in ones, or the user's from a module or a file.

Knows names. Does not know a function's arguments (`signatures.py`), nor processes or time limits
(`workers.py`), and imports no jax, because reward workers import this module.
"""

import importlib
import importlib.util
import inspect
import pickle
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

from pat_jax.common.errors import UserError
from pat_jax.rl.rewards.built_in import BUILT_IN, MATH, RewardFunction
from pat_jax.rl.rewards.math_value import same_value

PICKLED = ".reward"  # suffix of files with a program's own functions, pickled
MODEL = "model:"  # before the directory, or the name on the Hub, of a reward model


def resolve_reward(spec: str) -> RewardFunction:
    """Returns the function that `spec` names.

    Args:
      spec: `exact`, `math`, `math_lenient`, `module:function` or `path/to/file.py:function`. A file
        may also be one that `run/results/serialized_rewards.py` wrote.
    """
    if spec in BUILT_IN:
        if spec in MATH:
            same_value("1/2", "0.5")  # imports and builds its grammar now, not within a time limit
        return BUILT_IN[spec]
    source, _, name = spec.rpartition(":")
    if not source or not name:
        raise UserError(
            f"option --reward is {spec!r}: expected {', '.join(BUILT_IN)}, module:function, "
            "path/to/file.py:function, http://host:port/path or model:DIR; correct the option."
        )
    module = _import_source(source, spec)
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
    """Returns the rewards' names in metrics: that of a function, or the last part of a path.

    Equal names are numbered."""
    names: list[str] = []
    for spec in specs:
        own = spec.rpartition(":")[2]
        if is_endpoint(spec):
            own = re.split("[?#]", spec)[0].rstrip("/").rpartition("/")[2]
        elif model := model_of(spec):
            own = model.rstrip("/").rpartition("/")[2].partition("@")[0]
        name = found = metric_name(own)
        number = 1
        while found in names:
            number += 1
            found = f"{name}_{number}"
        names.append(found)
    return names


def metric_name(text: str) -> str:
    """Replaces characters that not every reader of metrics accepts by `_`."""
    return re.sub(r"[^\w.-]", "_", text, flags=re.ASCII)


def _import_source(source: str, spec: str) -> ModuleType:
    is_file = source.endswith((".py", PICKLED))
    if is_file and not Path(source).is_file():
        raise UserError(
            f"reward {spec!r}: file {source} does not exist: expected a Python file; check the path."
        )
    try:
        if source.endswith(PICKLED):
            return _unpickle(Path(source))
        return _import_file(Path(source)) if is_file else importlib.import_module(source)
    # Code of the user runs here and may raise anything.
    except (Exception, SystemExit) as error:
        if isinstance(error, ModuleNotFoundError) and error.name and source.startswith(error.name):
            raise UserError(
                f"reward {spec!r}: there is no module {error.name!r}: expected one that Python can "
                "import from this folder; check the name, or give path/to/file.py:function."
            ) from error
        raise UserError(
            f"reward {spec!r}: importing {source} raised {type(error).__name__} ({error}): expected "
            "a module that imports; correct it."
        ) from error


def _unpickle(path: Path) -> ModuleType:
    """Returns a module with the functions that a program has pickled by value."""
    module = ModuleType(path.stem)
    vars(module).update(pickle.loads(path.read_bytes()))
    return module


def _import_file(path: Path) -> ModuleType:
    path = path.resolve()
    sys.path.insert(0, str(path.parent))  # its neighbours, as for a script that Python runs
    module_spec = importlib.util.spec_from_file_location(path.stem, path)
    assert module_spec is not None and module_spec.loader is not None  # it ends in .py
    module = importlib.util.module_from_spec(module_spec)
    sys.modules[path.stem] = module  # dataclasses and pickles look their module up
    module_spec.loader.exec_module(module)
    return module
