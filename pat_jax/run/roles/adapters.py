"""The initial policy of a run, or its adapters and the base that they are added to.

Knows trainers and checkpoints' metadata. Does not know what is learned.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax.numpy as jnp

from pat_jax.common.errors import UserError
from pat_jax.common.hub import is_checkpoint, local_adapter, local_checkpoint
from pat_jax.common.owners import is_absent
from pat_jax.common.pytree import with_sharding, without_shards
from pat_jax.config.any_run import AnyRun
from pat_jax.models.checkpoints.hf_load import load_params
from pat_jax.models.checkpoints.peft_adapter import load_adapter
from pat_jax.models.lora import Lora
from pat_jax.models.policy import Params, Policy
from pat_jax.run.checkpoints.files import CHECKPOINTS
from pat_jax.training.trainable_params import Leaves
from pat_jax.training.trainer import Trainer


def initial_params(trainer: Trainer, config: AnyRun) -> Leaves:
    """Returns the initial values of the trained parameters: a policy, or adapters. New adapters
    leave the policy unchanged."""
    lora, adapter = trainer.trained.lora, config.lora.adapter
    if lora is None:
        return initial_policy(trainer, config, trainer.trained.weight_dtype)
    if adapter:
        folder = local_adapter(adapter, option="lora.adapter")
        return load_adapter(folder, lora, trainer.shardings)
    return trainer.init(config.seed)


def initial_policy(trainer: Trainer, config: AnyRun, dtype: jnp.dtype) -> Params:
    """Returns the policy that training begins with, or that adapters are added to."""
    shardings = trainer.trained.base_shardings
    if is_absent(trainer.layout.devices):
        return without_shards(with_sharding(trainer.policy.abstract(dtype), shardings))
    if Path(folder := local_checkpoint(config.model)).is_dir():
        return load_params(folder, trainer.policy, shardings, dtype)
    return trainer.policy.init(config.seed, shardings, dtype)


def identity(lora: Lora | None) -> dict[str, object]:
    """Returns the adapters' part of a run's fingerprint."""
    if lora is None:
        return {}
    doubled = {"lora.doubles_gate_up": True} if lora.doubles_gate_up else {}
    return {
        "lora.rank": lora.rank,
        "lora.alpha": lora.alpha,
        "lora.modules": lora.modules,
        **doubled,
    }


def lora_of(fingerprint: Mapping[str, Any], policy: Policy) -> Lora | None:
    """Returns a checkpoint's adapters, by its fingerprint; None: the whole policy is trained."""
    if "lora.rank" not in fingerprint:
        return None
    rank, alpha, modules = (fingerprint[f"lora.{name}"] for name in ("rank", "alpha", "modules"))
    return Lora(policy, rank, alpha, tuple(modules), "lora.doubles_gate_up" in fingerprint)


def freeze_base(trainer: Trainer, config: AnyRun) -> int | None:
    """Gives the trainer the policy that adapters are added to, and returns its checksum. Returns
    None without adapters."""
    trained = trainer.trained
    if trained.lora is None:
        return None
    return trainer.freeze(initial_policy(trainer, config, trained.compute_dtype))


def check_base(meta: Mapping[str, Any], checksum: int | None, config: AnyRun) -> None:
    """Raises UserError if the adapters of a checkpoint, by its `meta`, belong to a base with
    another checksum than `checksum`. Without adapters both are None."""
    if meta.get("base_checksum") != checksum:
        made = "" if is_checkpoint(config.model) else f" with --seed {config.seed}"
        raise UserError(
            f"the adapters in {Path(config.run_dir) / CHECKPOINTS} are of another base, whose weights "
            f"differ from those of --model {config.model!r}{made}: give those that they were trained "
            "with, or another --run_dir."
        )
