"""`python -m pat_jax.train`: GRPO, PPO or distillation, whose rollouts change their layout.

The loop is in `run/loop.py`. From Python, use `pat_jax.train(...)`.
"""

import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from pat_jax.common.run_command import in_one_sentence, make_callable, run_command
from pat_jax.config.command_line import PRESETS, parse
from pat_jax.config.from_python import Config
from pat_jax.config.run import RunConfig
from pat_jax.run.files.folder import options_of_run
from pat_jax.run.process.in_process import in_program
from pat_jax.run.process.stop_signals import Stopped, StopSignals, leave
from pat_jax.run.start.given_rows import GivenRows

if TYPE_CHECKING:
    from pat_jax.rl.algorithm.losses import Loss
    from pat_jax.run.results.saved_run import SavedRun

Reward = str | Callable[..., Any]


def main() -> None:
    try:
        with StopSignals() as signals:
            config = options_of_run(sys.argv[1:], parse)
            from pat_jax.commands.train import run  # and JAX, once the options are right

            run(config, signals, GivenRows())
    except Stopped as stop:
        leave(stop.exit_code)


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
        are dictionaries: `steps=20, rollout={"top_p": 0.9}`. `data` and `eval={"data": ...}` take
        rows instead of files: a list of dictionaries, or a datasets.Dataset. The run's folder
        keeps the rows, so that a resumed run need not be given them again.

    Returns:
      The run's folder, with what it has left there.

    Raises:
      UserError: one sentence about what is wrong.
      KeyboardInterrupt: the run was interrupted and saved; `resume=True, run_dir=…` continues it.
    """
    from pat_jax.commands.train import run
    from pat_jax.run.results.saved_run import SavedRun
    from pat_jax.run.start.sent_code import loss_of, rewards_of

    with in_one_sentence(), in_program() as signals:
        asked = dict(options)
        if reward is not None:
            asked["reward"] = rewards_of(reward)
        if loss is not None:
            asked["algorithm.loss"] = loss_of(loss)
        rows = GivenRows()
        config_of_run = options_of_run(rows.words(config, asked, RunConfig, PRESETS), parse)
        folder = run(config_of_run, signals, rows)
    return SavedRun(folder)


make_callable(__name__, train)

if __name__ == "__main__":
    run_command(main)
