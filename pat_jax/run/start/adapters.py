"""Adapters at the beginning of a run, and the base that they are added to, whatever is learned.

Knows trainers and checkpoints' metadata. Does not know where a base comes from.
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax.numpy as jnp

from pat_jax.common.errors import UserError
from pat_jax.common.hub import is_checkpoint, local_adapter
from pat_jax.config.any_run import AnyRun
from pat_jax.config.lora import LoraConfig
from pat_jax.models.checkpoints.peft_adapter import load_adapter
from pat_jax.models.lora import Lora
from pat_jax.models.policy import Params, Policy
from pat_jax.run.process.folder import CHECKPOINTS
from pat_jax.training.trained import Leaves
from pat_jax.training.trainer import Trainer


def first_adapters(trainer: Trainer, lora: Lora, config: LoraConfig, seed: int) -> Leaves:
    """Those of the directory to go on from, or new ones, which change nothing."""
    if config.adapter:
        folder = local_adapter(config.adapter, option="lora.adapter")
        return load_adapter(folder, lora, trainer.shardings)
    return trainer.init(seed)


def identity(lora: Lora | None) -> dict[str, object]:
    """What a checkpoint of a run has to share with the run that goes on from it."""
    if lora is None:
        return {}
    return {"lora.rank": lora.rank, "lora.alpha": lora.alpha, "lora.modules": lora.modules}


def lora_of(fingerprint: Mapping[str, Any], policy: Policy) -> Lora | None:
    """The adapters that a checkpoint of `policy` has, from its fingerprint; None: all is trained."""
    if "lora.rank" not in fingerprint:
        return None
    rank, alpha, modules = (fingerprint[f"lora.{name}"] for name in ("rank", "alpha", "modules"))
    return Lora(policy, rank, alpha, tuple(modules))


def freeze_base(trainer: Trainer, base: Callable[[jnp.dtype], Params]) -> int | None:
    """Gives the trainer the policy that adapters are added to, if there are any.

    Args:
      base: that policy, in the dtype that it is asked for.

    Returns:
      A checksum of its values.
    """
    trained = trainer.trained
    return trainer.freeze(base(trained.base_dtype)) if trained.lora else None


def check_base(meta: Mapping[str, Any], checksum: int | None, config: AnyRun) -> None:
    """
    Args:
      meta: of the checkpoint that is gone on from.
      checksum: of the base that there is now; None: all of the policy is trained.

    Raises:
      UserError: its adapters are of another base.
    """
    if meta.get("base_checksum") != checksum:
        made = "" if is_checkpoint(config.model) else f" with --seed {config.seed}"
        raise UserError(
            f"the adapters in {Path(config.run_dir) / CHECKPOINTS} are of another base, whose weights "
            f"differ from those of --model {config.model!r}{made}: give those that they were trained "
            "with, or another --run_dir."
        )
