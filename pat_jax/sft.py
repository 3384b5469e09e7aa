"""`python -m pat_jax.sft`: supervised fine-tuning on files of examples, or training on text.

The loop is in `run/sft/loop.py`.
"""

import sys
from functools import partial

from pat_jax.common.run_command import run_command
from pat_jax.config.command_line import parse
from pat_jax.config.sft import SftConfig
from pat_jax.run.process.folder import options_of_run
from pat_jax.run.process.stop_signals import Stopped, StopSignals, leave

COMMAND = "sft"
read = partial(parse, config_class=SftConfig, prog=f"python -m pat_jax.{COMMAND}", presets=None)


def main() -> None:
    try:
        with StopSignals() as signals:
            config = options_of_run(sys.argv[1:], read)
            from pat_jax.run.sft.loop import run  # and JAX, once the options are right

            run(config, signals, COMMAND)
    except Stopped as stop:
        leave(stop.exit_code)


if __name__ == "__main__":
    run_command(main)
