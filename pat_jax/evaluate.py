"""`python -m pat_jax.evaluate`: pass@k and rewards of a model, or the accuracy of a reward model.

All samples of all files go through one session of the engine. Each sample is scored as soon as it
ends, by `run/evaluation.py`, which training runs use too. From Python, use `pat_jax.evaluate(...)`.
"""

import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pat_jax.common.run_command import offer
from pat_jax.config.command_line import parse
from pat_jax.config.from_python import Config
from pat_jax.evaluation.config import EvaluateConfig
from pat_jax.evaluation.options import options_of_evaluation
from pat_jax.run.process.in_process import in_program
from pat_jax.run.start.given_rows import HELDOUT_FILE, GivenRows

if TYPE_CHECKING:
    from pat_jax.evaluation.results import EvaluationResults
    from pat_jax.run.results.saved_run import SavedRun

Reward = str | Callable[..., Any]
read = partial(parse, config_class=EvaluateConfig, prog="python -m pat_jax.evaluate", presets=None)


def main() -> None:
    config = options_of_evaluation(sys.argv[1:], read)
    from pat_jax.commands import evaluate as command  # and JAX, once the options are right

    print(command.evaluate(config, GivenRows()))


def evaluate(
    config: Config = None,
    *,
    run: "SavedRun | str | Path | None" = None,
    reward: Reward | Sequence[Reward] | None = None,
    **options: Any,
) -> "EvaluationResults":
    """Evaluates a model on sets of problems, as `python -m pat_jax.evaluate` does; with the option
    `reward_model`, a reward model on preference pairs.

        found = pat_jax.evaluate(run=run, data="gsm8k.jsonl", num_generations=8)
        print(found, found.sets["gsm8k"]["pass"]["8"]["value"])

    Args:
      config: a YAML file, or a dictionary of options.
      run: a run of `train` or `sft` whose policy is evaluated, instead of `model`.
      reward: a name as in `--reward`, a function, or several of both, as `train` takes them.
      options: win over `config`, by the names that `python -m pat_jax.evaluate --help` lists.
        `data` takes rows instead of files: a list of dictionaries, or a datasets.Dataset. Their set
        is called `heldout`.

    Returns:
      What results.json holds: the metrics of each data set, and of all. `print` shows a table.

    Raises:
      UserError: one sentence about what is wrong.
      KeyboardInterrupt: it was interrupted; `resume=True, out=…` keeps the responses so far.
    """
    from pat_jax.commands import evaluate as command
    from pat_jax.run.results.saved_run import SavedRun
    from pat_jax.run.start.sent_code import rewards_of

    with in_program():
        asked = dict(options)
        if run is not None:
            asked["run_dir"] = str(SavedRun.of(run).folder)
        if reward is not None:
            asked["reward"] = rewards_of(reward)
        rows = GivenRows(HELDOUT_FILE)
        argv = rows.words(config, asked, EvaluateConfig, presets=None)
        return command.evaluate(options_of_evaluation(argv, read), rows)


offer(evaluate, main)
