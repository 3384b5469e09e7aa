"""`pat_jax` and `python -m pat_jax`: runs a command by its name, or lists all commands."""

import ast
import re
import sys
from importlib import import_module
from pathlib import Path

from pat_jax.common.errors import UserError
from pat_jax.common.run_command import run_command
from pat_jax.version import __version__

FIRST_LINE = re.compile(r"`python -m pat_jax\.(\w+)`: (.+)")


def main() -> None:
    words = sys.argv[1:]
    if "--version" in words:
        print(f"pat_jax {__version__}")
    elif not words or words[0] in ("-h", "--help"):
        print(listing(commands()))
    elif words[0] in commands():
        sys.argv = [f"pat_jax {words[0]}", *words[1:]]
        import_module(f"pat_jax.{words[0]}").main()
    else:
        raise UserError(f"no command {words[0]!r}: expected one of {', '.join(commands())}.")


def commands() -> dict[str, str]:
    """Returns each command with the first line of its docstring. Imports no command."""
    found = {}
    for path in sorted(Path(__file__).parent.glob("*.py")):
        text = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
        if match := FIRST_LINE.match(text):
            found[match[1]] = match[2]
    return found


def listing(found: dict[str, str]) -> str:
    width = max(map(len, found))
    lines = [f"  pat_jax {name:<{width}}  {text}" for name, text in found.items()]
    return "\n".join(
        [
            f"pat_jax {__version__}: reinforcement learning of language models in JAX.",
            "",
            *lines,
            "",
            "Each has --help, and is also a module (python -m pat_jax.train) and a Python function",
            "(pat_jax.train(steps=20)). pat_jax train alone runs a demonstration on any machine.",
        ]
    )


def script() -> None:
    """The console script `pat_jax`."""
    run_command(main)


if __name__ == "__main__":
    script()
