"""Options that must be given again to resume a run, although its folder has them.

The folder may be from somebody else. Knows rewards by name. Imports no jax, as options are read
before it.
"""

import shlex
from pathlib import Path

from pat_jax.common.errors import UserError
from pat_jax.common.options.declared import Options
from pat_jax.config.rewards import RewardOptions
from pat_jax.config.run import RunConfig
from pat_jax.rl.own_code import is_sent
from pat_jax.rl.rewards.rewards import model_of

# Options that `check_asked` compares with those of a folder.
ASKED = ("reward", "algorithm.loss")


def asked_again(config: Options) -> list[str]:
    """Returns the options that must be given again to resume a run or evaluation: rewards that run
    code or are sent the responses, and a loss of the user's own."""
    found: list[str] = []
    if isinstance(config, RewardOptions) and any(map(_is_open, config.reward)):
        found += ["--reward", *config.reward]
    if isinstance(config, RunConfig) and _is_open(config.algorithm.loss):
        found += ["--algorithm.loss", config.algorithm.loss]
    return found


def check_asked(config: Options, given: Options, folder: Path) -> None:
    """Raises UserError unless the command line's options, `given`, repeat those that `asked_again`
    returns for `config`, which includes the folder's options."""
    if (wanted := asked_again(config)) != asked_again(given):
        raise UserError(
            f"the options in {folder} run code or send texts to an address ({shlex.join(wanted)}): expected "
            f"them with --resume, too, since a folder may be from somebody else; if they are what you "
            f"want, add {shlex.join(wanted)}."
        )


def _is_open(spec: str) -> bool:
    return ":" in spec and not model_of(spec) and not is_sent(spec)  # see `check_sent`
