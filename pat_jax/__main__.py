"""`pat_jax` and `python -m pat_jax`: runs a command by its name, or lists all commands."""

import re
import sys
from importlib import import_module

import pat_jax
from pat_jax.common.errors import UserError
from pat_jax.common.run_command import run_command

# Each command with what it does, as the package's documentation lists them.
COMMANDS = dict(re.findall(r"^    (\w+)  +(.+)$", pat_jax.__doc__ or "", re.MULTILINE))


def main() -> None:
    words = sys.argv[1:]
    if "--version" in words:
        print(f"pat_jax {pat_jax.__version__}")
    elif not words or words[0] in ("-h", "--help"):
        print(listing())
    elif words[0] in COMMANDS:
        sys.argv = [f"pat_jax {words[0]}", *words[1:]]
        import_module(f"pat_jax.{words[0]}").main()
    else:
        raise UserError(f"no command {words[0]!r}: expected one of {', '.join(COMMANDS)}.")


def listing() -> str:
    width = max(map(len, COMMANDS))
    lines = [f"  pat_jax {name:<{width}}  {text}" for name, text in COMMANDS.items()]
    return "\n".join(
        [
            f"pat_jax {pat_jax.__version__}: reinforcement learning of language models in JAX.",
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
