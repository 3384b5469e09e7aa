"""`python -m pat_jax.reward_model`: trains a reward model on preference pairs.

The loop is that of supervised fine-tuning, in `run/sft/loop.py`.
"""

import sys
from functools import partial

from pat_jax.common.run_command import run_command
from pat_jax.config.command_line import parse
from pat_jax.config.reward_model import RewardModelConfig
from pat_jax.run.process.folder import options_of_run
from pat_jax.run.process.stop_signals import Stopped, StopSignals, leave

COMMAND = "reward_model"
read = partial(
    parse, config_class=RewardModelConfig, prog=f"python -m pat_jax.{COMMAND}", presets=None
)


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
