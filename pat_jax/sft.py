"""`python -m pat_jax.sft`: supervised fine-tuning or DPO on files of examples, or training on text.

The loop is in `run/sft/loop.py`. From Python, use `pat_jax.sft(...)`.
"""

from typing import TYPE_CHECKING, Any

from pat_jax.commands.runs import RunCommand
from pat_jax.common.run_command import offer
from pat_jax.config.from_python import Config
from pat_jax.config.sft import SftConfig

if TYPE_CHECKING:
    from pat_jax.run.results.saved_run import SavedRun

COMMAND = RunCommand("sft", SftConfig, "fine_tune")
read = COMMAND.read
main = COMMAND.main


def sft(config: Config = None, **options: Any) -> "SavedRun":
    """Teaches a language model by examples, as `python -m pat_jax.sft` does.

        run = pat_jax.sft(model=folder, data=[{"prompt": "2 + 3 =", "completion": " 5"}, ...])
        run = pat_jax.sft(model=folder, loss="dpo", data="pairs.jsonl")

    Args:
      config: a YAML file, or a dictionary of options.
      options: win over `config`, by the names that `python -m pat_jax.sft --help` lists; sections
        are dictionaries: `epochs=2, optimizer={"learning_rate": 1e-5}`. `data` and
        `eval={"data": ...}` take rows instead of files: a list of dictionaries, or a
        datasets.Dataset, with prompt and completion, messages or text, or with `loss="dpo"` chosen
        and rejected. The run's folder keeps the rows for its resumption.

    Returns:
      The run's folder, with what it has left there.

    Raises:
      UserError: one sentence about what is wrong.
      KeyboardInterrupt: the run was interrupted and saved; `resume=True, run_dir=…` continues it.
    """
    return COMMAND(config, options)


offer(sft, main)
