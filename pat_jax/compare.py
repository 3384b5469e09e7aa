"""`python -m pat_jax.compare`: curves of several runs on one page, and the options that differ.

python -m pat_jax.compare runs/first runs/second
"""

import os
import sys
from functools import partial
from itertools import compress, pairwise
from operator import not_
from typing import TYPE_CHECKING

from pat_jax.common.run_command import in_one_sentence, offer
from pat_jax.config.command_line import parse
from pat_jax.run.results.compare_config import CompareConfig

if TYPE_CHECKING:
    from pat_jax.commands.compare import Compared
    from pat_jax.run.results.saved_run import SavedRun

read = partial(parse, config_class=CompareConfig, prog="python -m pat_jax.compare", presets=None)


def main() -> None:
    words = sys.argv[1:]
    is_folder = [x[:1] != "-" and (y[:1] != "-" or "=" in y) for y, x in pairwise(["", *words])]
    if any(is_folder) and not any(word.startswith("--runs") for word in words):
        options = compress(words, map(not_, is_folder))
        words = ["--runs", *compress(words, is_folder), *options]
    config = read(words)
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


offer(compare, main)
