"""Modules that are called: `pat_jax.train(...)` is `python -m pat_jax.train` in Python.

A command's module has the name that its function should have, and importing it anywhere puts the
module under that name: so the module is what is called.
"""

import inspect
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any


def make_callable(module_name: str, function: Callable[..., Any]) -> None:
    """Calling the module calls `function`, whose signature and documentation it then shows."""
    module = sys.modules[module_name]
    members = {"__call__": staticmethod(function), "__signature__": inspect.signature(function)}
    module.__class__ = type("CallableModule", (ModuleType,), members)
    module.__doc__ = function.__doc__
