"""`python -m pat_jax.compare`: curves of several runs on one page, and the options that differ.

python -m pat_jax.compare runs/first runs/second
"""

import os
import sys
from functools import partial
from typing import TYPE_CHECKING

from pat_jax.common.run_command import in_one_sentence, make_callable, run_command
from pat_jax.config.command_line import parse
from pat_jax.run.results.compare_config import CompareConfig

if TYPE_CHECKING:
    from pat_jax.commands.compare import Compared
    from pat_jax.run.results.saved_run import SavedRun

read = partial(parse, config_class=CompareConfig, prog="python -m pat_jax.compare", presets=None)


def main() -> None:
    words = sys.argv[1:]
    config = read(["--runs", *words] if words[:1] and not words[0].startswith("-") else words)
    from pat_jax.commands.compare import compared  # and NumPy, once the options are right

    print(compared(config.runs, config.out))


def compare(*runs: "str | os.PathLike[str] | SavedRun", out: str = "compare.html") -> "Compared":
    """Compares runs on one page, as `python -m pat_jax.compare` does: curves over one another, and
    the options that differ. Raises UserError, one sentence about what is wrong.

        pat_jax.compare("runs/first", "runs/second").options

    Args:
      runs: two or more runs: folders, or what `pat_jax.train` has returned.
      out: the page to write.
    """
    from pat_jax.commands.compare import compared

    with in_one_sentence():
        return compared([getattr(run, "folder", run) for run in runs], out)


make_callable(__name__, compare)

if __name__ == "__main__":
    run_command(main)
