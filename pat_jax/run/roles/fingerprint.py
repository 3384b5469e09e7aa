"""Checks that a checkpoint belongs to this run's models: fingerprints, and the bases of adapters.

Knows shapes, adapters and checkpoints' metadata. Does not know parameters.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from pat_jax.common.errors import UserError
from pat_jax.common.hub import is_checkpoint
from pat_jax.config.role_table import CRITIC, POLICY, REFERENCE
from pat_jax.models.config import PADDING
from pat_jax.models.lora import Lora
from pat_jax.models.policy import Policy
from pat_jax.run.checkpoints.files import CHECKPOINTS
from pat_jax.training.role_model import RoleModel


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


def fingerprint(models: Sequence[RoleModel]) -> dict[str, object]:
    """Returns the shapes and adapters of trained models: a resumed checkpoint must have the same.

    Args:
      models: the policy first.
    """
    policy, *others = models
    of_policy = asdict(policy.policy.config)
    has_reference = any(model.role.name == REFERENCE for model in models)
    found = of_policy | {"has_reference": has_reference} | identity(policy.lora)
    for model in others:
        if model.role.trained:
            own = asdict(model.policy.config)
            other = {k: v for k, v in own.items() if k not in PADDING and v != of_policy[k]}
            named = other | identity(model.lora)
            name = model.role.name
            found |= {f"has_{name}": True, **{f"{name}.{key}": x for key, x in named.items()}}
    return found


def check_bases(
    meta: Mapping[str, Any],
    checksums: Mapping[str, int | None],
    run_dir: str,
    models: Mapping[str, RoleModel],
    seed: int,
) -> None:
    """Raises UserError if adapters of a checkpoint, by its `meta`, belong to a base with another
    checksum than that in `checksums`. Without adapters both are None."""
    policy = models[POLICY].role.source
    check_base(meta, checksums["base_checksum"], run_dir, policy, seed)
    key = "critic_base_checksum"
    if CRITIC in models and meta.get(key) != checksums.get(key):
        raise UserError(
            f"the critic's adapters in {Path(run_dir) / CHECKPOINTS} are of another base, whose weights "
            f"differ from those of {models[CRITIC].role.source or policy!r}: give the --critic.model that they were "
            "trained with, or another --run_dir."
        )


def check_base(
    meta: Mapping[str, Any], checksum: int | None, run_dir: str, model: str, seed: int
) -> None:
    """Raises UserError if the policy's adapters of a checkpoint belong to a base with another
    checksum than `checksum`. Without adapters both are None."""
    if meta.get("base_checksum") != checksum:
        made = "" if is_checkpoint(model) else f" with --seed {seed}"
        raise UserError(
            f"the adapters in {Path(run_dir) / CHECKPOINTS} are of another base, whose weights "
            f"differ from those of --model {model!r}{made}: give those that they were trained "
            "with, or another --run_dir."
        )
