"""Options that a run is resumed with although its folder has them.

The folder may be from somebody else. Knows rewards by name. Imports no jax, as options are read
before it.
"""

import shlex
from pathlib import Path

from pat_jax.common.errors import UserError
from pat_jax.config.rewards import RewardOptions
from pat_jax.rl.rewards.rewards import PICKLED, model_of


def asked_again(config: object) -> list[str]:
    """Returns the options that a run or evaluation is resumed with, though its folder has them:
    rewards that run code or are sent the responses, and the variable that is sent with them. A
    folder may be from somebody else."""
    if not isinstance(config, RewardOptions) or not any(map(_is_open, config.reward)):
        return []
    token = ["--reward_token_env", config.reward_token_env] if config.reward_token_env else []
    return ["--reward", *config.reward, *token]


def check_asked(config: object, given: object, folder: Path) -> None:
    """Raises UserError unless the options `given` on the command line have what `asked_again` says
    of `config`, which those of the folder are part of."""
    if (wanted := asked_again(config)) != asked_again(given):
        raise UserError(
            f"the options in {folder} run code or send texts to an address ({' '.join(wanted[1:])}): expected "
            f"them with --resume, too, since a folder may be from somebody else; if they are what you "
            f"want, add {shlex.join(wanted)}."
        )


def _is_open(spec: str) -> bool:
    is_named = ":" in spec and not model_of(spec)
    return is_named and Path(spec.rpartition(":")[0]).suffix != PICKLED  # see `check_shipped`
