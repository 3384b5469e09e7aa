"""`python -m pat_jax`: lists the commands, by the first line of each command's file."""

import ast
import re
import sys
from pathlib import Path

from pat_jax import __version__
from pat_jax.common.errors import UserError
from pat_jax.config.command_line import run_command

FIRST_LINE = re.compile(r"`python -m pat_jax\.(\w+)`: (.+)")


def main() -> None:
    words = sys.argv[1:]
    if "--version" in words:
        print(f"pat_jax {__version__}")
    elif not words or words[0] in ("-h", "--help"):
        print(listing(commands()))
    elif words[0] in commands():
        rest = " ".join(["python", "-m", f"pat_jax.{words[0]}", *words[1:]])
        raise UserError(f"commands are modules: write {rest}.")
    else:
        raise UserError(f"no command {words[0]!r}: expected one of {', '.join(commands())}.")


def commands() -> dict[str, str]:
    """What each command does, without importing any of them."""
    found = {}
    for path in sorted(Path(__file__).parent.glob("*.py")):
        text = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
        if match := FIRST_LINE.match(text):
            found[match[1]] = match[2]
    return found


def listing(found: dict[str, str]) -> str:
    width = max(map(len, found))
    lines = [f"  python -m pat_jax.{name:<{width}}  {text}" for name, text in found.items()]
    return "\n".join(
        [
            f"pat_jax {__version__}: reinforcement learning of language models in JAX.",
            "",
            *lines,
            "",
            "Each has --help; python -m pat_jax.train alone is a demonstration for any machine.",
        ]
    )


if __name__ == "__main__":
    run_command(main)
