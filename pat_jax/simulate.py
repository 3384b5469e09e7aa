"""`python -m pat_jax.simulate`: replays rollouts with other options, by the times of a profile.

The engine's planner runs on a simulated clock with the times of a profile. Response lengths come
from a file or a built-in distribution. Compares the result with each static layout; uses no device.
"""

import sys
from functools import partial
from typing import TYPE_CHECKING, Any

from pat_jax.common.run_command import in_one_sentence, offer
from pat_jax.config.command_line import parse
from pat_jax.config.from_python import Config, words
from pat_jax.profiling.capacity.simulate_config import SimulateConfig

if TYPE_CHECKING:
    from pat_jax.commands.simulate import Simulated

read = partial(parse, config_class=SimulateConfig, prog="python -m pat_jax.simulate", presets=None)


def main() -> None:
    config = read(sys.argv[1:])
    print(_found(config))


def _found(config: SimulateConfig) -> "Simulated":
    # With JAX, once the options are known to be right.
    from pat_jax.commands.simulate import simulated

    return simulated(config)


def simulate(config: Config = None, **options: Any) -> "Simulated":
    """Replays rollouts on a measured machine, as `python -m pat_jax.simulate` does. Raises
    UserError, one sentence about what is wrong.

        pat_jax.simulate(profile=measured.path, responses=[512, 2048], lengths="math")

    Args:
      config: a YAML file, or a dictionary of options.
      options: win over `config`, by the names that `python -m pat_jax.simulate --help` lists.
        Several values are a list, or a text with commas.
    """
    several = {name: value for name, value in options.items() if isinstance(value, list | tuple)}
    options |= {name: ",".join(map(str, values)) for name, values in several.items()}
    with in_one_sentence():
        return _found(read(words(config, options, SimulateConfig, presets=None)))


offer(simulate, main)
