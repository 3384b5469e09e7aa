"""`python -m pat_jax.sft`: supervised fine-tuning on files of examples, or training on text.

The loop is in `run/sft/loop.py`.
"""

from functools import partial

from pat_jax.commands.fine_tune import fine_tune
from pat_jax.common.run_command import run_command
from pat_jax.config.command_line import parse
from pat_jax.config.sft import SftConfig

COMMAND = "sft"
read = partial(parse, config_class=SftConfig, prog=f"python -m pat_jax.{COMMAND}", presets=None)
main = partial(fine_tune, COMMAND, read)

if __name__ == "__main__":
    run_command(main)
