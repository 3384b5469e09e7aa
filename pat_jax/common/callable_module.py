"""Makes modules callable: `pat_jax.train(...)` in Python does what `python -m pat_jax.train` does.

A command's module and its function have the same name in the package, where importing the module
would hide the function. So the module itself is callable.
"""

import inspect
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any


def make_callable(module_name: str, function: Callable[..., Any]) -> None:
    """Makes calls of the module call `function`. The module then shows the function's signature and
    documentation."""
    module = sys.modules[module_name]
    members = {"__call__": staticmethod(function), "__signature__": inspect.signature(function)}
    module.__class__ = type("CallableModule", (ModuleType,), members)
    module.__doc__ = function.__doc__
