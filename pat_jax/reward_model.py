"""`python -m pat_jax.reward_model`: trains a reward model on preference pairs.

The loop is that of supervised fine-tuning, in `run/sft/loop.py`.
"""

from functools import partial

from pat_jax.commands.fine_tune import fine_tune
from pat_jax.common.run_command import run_command
from pat_jax.config.command_line import parse
from pat_jax.config.sft import RewardModelConfig

COMMAND = "reward_model"
read = partial(
    parse, config_class=RewardModelConfig, prog=f"python -m pat_jax.{COMMAND}", presets=None
)
main = partial(fine_tune, COMMAND, read)

if __name__ == "__main__":
    run_command(main)
