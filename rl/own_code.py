"""Loads a user's own Python: a module, a file, or objects that a program has pickled and sent.

Knows names and files. Does not know rewards or losses. Imports no jax, because reward workers
import this module.
"""

import importlib
import importlib.util
import pickle
import sys
from pathlib import Path
from types import ModuleType

from pat_jax.common.errors import UserError, shown

# Suffixes of files with a reward or a loss that a program has sent, pickled by value.
SENT_REWARD = ".reward"
SENT_LOSS = ".loss"
_SENT = (SENT_REWARD, SENT_LOSS)


def is_sent(spec: str) -> bool:
    """Whether `spec` names a file that a program has sent (`run/start/sent_code.py`)."""
    return source_of(spec).endswith(_SENT)


def source_of(spec: str) -> str:
    """Returns the module or file of `source:name`, or "" if there is no colon."""
    return spec.rpartition(":")[0]


def check_sent(option: str, spec: str, folder: Path) -> None:
    """Raises UserError if `spec` names a pickle outside of `folder`, where this user's programs
    write them. A pickle can run code, and somebody else's run folder may name one of its own."""
    if is_sent(spec) and Path(source_of(spec)).absolute().parent != folder.absolute():
        name = option.rpartition(".")[2]
        raise UserError(
            f"option --{option} is {shown(spec)}: expected what a program of yours has sent to {folder}, as "
            f"unpickling such a file runs code; give --{option} path/to/file.py:NAME, or "
            f"pat_jax.train({name}=...)."
        )


def module_of(source: str, what: str, *, suffix: str = "") -> ModuleType:
    """Imports the module or file `source`. Raises UserError, beginning with `what`, if it cannot be
    imported.

    Args:
      suffix: end of the module name of a file, so that the file does not replace a library.
    """
    is_file = source.endswith((".py", *_SENT))
    if is_file and not Path(source).is_file():
        raise UserError(
            f"{what}: file {source} does not exist: expected a Python file; check the path."
        )
    try:
        if source.endswith(_SENT):
            module = ModuleType(Path(source).stem)
            vars(module).update(pickle.loads(Path(source).read_bytes()))
            return module
        return _imported(Path(source), suffix) if is_file else importlib.import_module(source)
    # Code of the user runs here and may raise anything.
    except (Exception, SystemExit) as error:
        if isinstance(error, ModuleNotFoundError) and error.name and source.startswith(error.name):
            raise UserError(
                f"{what}: there is no module {error.name!r}: expected one that Python can "
                "import from this folder; check the name, or give path/to/file.py:NAME."
            ) from error
        raise UserError(
            f"{what}: importing {source} raised {type(error).__name__} ({error}): expected "
            "a module that imports; correct it."
        ) from error


def _imported(path: Path, suffix: str) -> ModuleType:
    path = path.resolve()
    if (folder := str(path.parent)) != sys.path[0]:
        sys.path.insert(0, folder)  # so that it can import its neighbours, as a script can
    name = f"{path.stem}{suffix}"
    module_spec = importlib.util.spec_from_file_location(name, path)
    assert module_spec is not None and module_spec.loader is not None  # it ends in .py
    module = importlib.util.module_from_spec(module_spec)
    sys.modules[name] = module  # dataclasses and pickles look up their module
    module_spec.loader.exec_module(module)
    return module
