"""Folders of runs as they are after some steps, without the steps: checkpoints of made-up policies."""

from dataclasses import asdict
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pat_jax.config.command_line import dump
from pat_jax.config.sft import SftConfig
from pat_jax.models.checkpoints.hf_load import check_checkpoint, load_params
from pat_jax.models.lora import Lora
from pat_jax.models.policy import Policy
from pat_jax.rl.algorithm.optimizer import make_optimizer
from pat_jax.rl.algorithm.update import TrainState
from pat_jax.run.checkpoints.checkpoint import Checkpointer
from pat_jax.run.checkpoints.files import CHECKPOINTS
from pat_jax.run.roles.fingerprint import identity
from pat_jax.training.checksum import base_checksum
from pat_jax.training.trainable_params import Leaves


def policy_of(model: Path) -> Policy:
    return Policy.from_config(check_checkpoint(model))


def learned(like: Any, seed: int, scale: float = 0.1) -> Any:
    """Numbers in the place of shapes."""
    rng = np.random.default_rng(seed)
    return jax.tree.map(
        lambda x: jnp.asarray(rng.normal(1.0 if x.ndim == 1 else 0.0, scale, x.shape), x.dtype),
        like,
    )


def save_run(
    folder: Path, model: Path, params: Leaves, *, step: int, lora: Lora | None = None
) -> Path:
    """Adds a checkpoint of `params`, what a run on `model` has trained after `step`.

    Returns:
      The checkpoint.
    """
    optimizer = make_optimizer(learning_rate=1e-3, total_steps=9, schedule="cosine", warmup_steps=0)
    state = {"train": TrainState(params, optimizer.init(params), jnp.int32(step))}
    policy = policy_of(model)
    base = load_params(model, policy, None, jnp.dtype(jnp.float32))
    fingerprint = asdict(policy.config) | {"learns_from": "examples"} | identity(lora)
    meta = {
        "config": dump(SftConfig(model=str(model), compute_dtype="float32")),
        "base_checksum": int(base_checksum(policy, base)) if lora else None,
    }
    with Checkpointer(folder / CHECKPOINTS, 10, fingerprint=fingerprint) as checkpoints:
        checkpoints.save(step, state, meta)
        checkpoints.wait()
    return folder / CHECKPOINTS / str(step)
