"""`python -m pat_jax.profile`: measures step times of one model here, by which `train` plans.

Takes the options of `train`, so that a run's --preset and --config can be used unchanged. Times
that the file has already are not measured again: an interrupted measurement continues.
"""

import sys
from typing import TYPE_CHECKING, Any

from pat_jax.common.run_command import offer
from pat_jax.config.command_line import parse
from pat_jax.config.from_python import Config, words
from pat_jax.profiling.measure.config import ProfileConfig
from pat_jax.run.process.in_process import in_program

if TYPE_CHECKING:
    from pat_jax.commands.profile import Measured


def main() -> None:
    config = parse(sys.argv[1:], ProfileConfig, prog="python -m pat_jax.profile")
    from pat_jax.commands.profile import measured  # and JAX, once the options are right

    found = measured(config)
    print(found)
    print(f"profile {found.path}, picture {found.path.with_suffix('.svg')}")


def profile(config: Config = None, **options: Any) -> "Measured":
    """Measures this machine for one model, as `python -m pat_jax.profile` does. Raises UserError,
    one sentence about what is wrong.

        measured = pat_jax.profile(model="Qwen/Qwen3-0.6B")
        pat_jax.simulate(profile=measured.path)

    Args:
      config: the name of a preset, a YAML file, or a dictionary of options.
      options: win over `config`, by the names that `python -m pat_jax.profile --help` lists;
        sections are dictionaries.
    """
    from pat_jax.commands.profile import measured

    with in_program():
        argv = words(config, options, ProfileConfig)
        return measured(parse(argv, ProfileConfig, prog="python -m pat_jax.profile"))


offer(profile, main)
