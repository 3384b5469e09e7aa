"""`python -m pat_jax.train`: GRPO, PPO or distillation, with rollouts that change their layout.

The loop is in `run/loop.py`. From Python, use `pat_jax.train(...)`.
"""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from pat_jax.commands.runs import RunCommand
from pat_jax.common.run_command import offer
from pat_jax.config.command_line import PRESETS
from pat_jax.config.from_python import Config
from pat_jax.config.run import RunConfig

if TYPE_CHECKING:
    from pat_jax.rl.algorithm.losses import Loss
    from pat_jax.run.results.saved_run import SavedRun

Reward = str | Callable[..., Any]


COMMAND = RunCommand("train", RunConfig, "train", PRESETS)
main = COMMAND.main


def train(
    config: Config = None,
    *,
    reward: Reward | Sequence[Reward] | None = None,
    loss: "str | Loss | type[Loss] | None" = None,
    **options: Any,
) -> "SavedRun":
    """Improves a language model by reinforcement learning, as `python -m pat_jax.train` does.

        run = pat_jax.train("demo", reward=lambda completions, **_: [-len(x) for x in completions])
        run = pat_jax.train(model=folder, data=[{"prompt": "What is 2 + 3?", "answer": "5"}, ...])

    Args:
      config: the name of a preset, a YAML file, or a dictionary of options.
      reward: a name as in `--reward`, a function, or several of both. Functions run in processes of
        their own, with the present values that they refer to. The limits are --reward_timeout,
        --reward_memory and --reward_workers. What a function changes there does not change here.
      loss: a loss of your own, its class, or a name as in `--algorithm.loss`
        (docs/algorithms.md).
      options: win over `config`, by the names that `python -m pat_jax.train --help` lists; sections
        are dictionaries, or left out where the name is clear: `top_p=0.9, eval={"every": 5}`.
        `data` and `eval={"data": ...}` take rows instead of files: a list of dictionaries, or a
        datasets.Dataset. The run's folder keeps the rows, so that a resumed run need not be given
        them again.

    Returns:
      The run's folder, with what it has left there.

    Raises:
      UserError: one sentence about what is wrong.
      KeyboardInterrupt: the run was interrupted and saved; `resume=True, run_dir=…` continues it.
    """
    from pat_jax.run.start.sent_code import loss_of, rewards_of

    asked = dict(options)
    if reward is not None:
        asked["reward"] = rewards_of(reward)
    if loss is not None:
        asked["algorithm.loss"] = loss_of(loss)
    return COMMAND(config, asked)


offer(train, main)
