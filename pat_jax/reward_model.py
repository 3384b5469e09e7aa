"""`python -m pat_jax.reward_model`: trains a reward model on preference pairs.

The loop is that of supervised fine-tuning, in `run/sft/loop.py`. From Python, use
`pat_jax.reward_model(...)`.
"""

from typing import TYPE_CHECKING, Any

from pat_jax.commands.runs import RunCommand
from pat_jax.common.run_command import offer
from pat_jax.config.from_python import Config
from pat_jax.config.sft import RewardModelConfig

if TYPE_CHECKING:
    from pat_jax.run.results.saved_run import SavedRun

COMMAND = RunCommand("reward_model", RewardModelConfig, "fine_tune")
read = COMMAND.read
main = COMMAND.main


def reward_model(config: Config = None, **options: Any) -> "SavedRun":
    """Trains a reward model on preference pairs, as `python -m pat_jax.reward_model` does.

        pairs = [{"prompt": "2 + 3?", "chosen": "5", "rejected": "6"}, ...]
        run = pat_jax.reward_model(model=folder, data=pairs, checkpoint={"export_dir": "judge"})

    What it exports is a reward: `pat_jax.train(reward="model:judge", ...)`.

    Arguments, result and errors are as those of `pat_jax.sft`. The options are those that
    `python -m pat_jax.reward_model --help` lists.
    """
    return COMMAND(config, options)


offer(reward_model, main)
