"""`python -m pat_jax.reward_model`: trains a reward model on preference pairs.

The loop is that of supervised fine-tuning, in `run/sft/loop.py`. From Python, use
`pat_jax.reward_model(...)`.
"""

from functools import partial
from typing import TYPE_CHECKING, Any

from pat_jax.commands.fine_tune import fine_tune, fine_tuned
from pat_jax.common.run_command import make_callable, run_command
from pat_jax.config.command_line import parse
from pat_jax.config.from_python import Config
from pat_jax.config.sft import RewardModelConfig

if TYPE_CHECKING:
    from pat_jax.run.results.saved_run import SavedRun

COMMAND = "reward_model"
read = partial(
    parse, config_class=RewardModelConfig, prog=f"python -m pat_jax.{COMMAND}", presets=None
)
main = partial(fine_tune, COMMAND, read)


def reward_model(config: Config = None, **options: Any) -> "SavedRun":
    """Trains a reward model on preference pairs, as `python -m pat_jax.reward_model` does.

        pairs = [{"prompt": "2 + 3?", "chosen": "5", "rejected": "6"}, ...]
        run = pat_jax.reward_model(model=folder, data=pairs, checkpoint={"export_dir": "judge"})

    What it exports is a reward: `pat_jax.train(reward="model:judge", ...)`.

    Args:
      config: a YAML file, or a dictionary of options.
      options: win over `config`, by the names that `python -m pat_jax.reward_model --help` lists;
        sections are dictionaries. `data` and `eval={"data": ...}` take rows instead of files: a
        list of dictionaries, or a datasets.Dataset. The run's folder keeps them for its resumption.

    Returns:
      The run's folder, with what it has left there.

    Raises:
      UserError: one sentence about what is wrong.
      KeyboardInterrupt: the run was interrupted and saved; `resume=True, run_dir=…` continues it.
    """
    return fine_tuned(COMMAND, read, RewardModelConfig, config, options)


make_callable(__name__, reward_model)

if __name__ == "__main__":
    run_command(main)
