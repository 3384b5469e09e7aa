"""A directory of transformers as our policy, and the logits of both for the same tokens."""

from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import torch
from make_reference import logits

from pat_jax.models.checkpoints.hf_load import check_checkpoint, load_params
from pat_jax.models.policy import Params, Policy

TOKENS: Any = np.random.default_rng(2).integers(0, 61, (2, 50))


def ours_of(directory: Path) -> tuple[Policy, Params]:
    policy = Policy.from_config(check_checkpoint(directory))
    return policy, load_params(directory, policy, None, jnp.float32)


def our_logits(policy: Policy, params: Params) -> np.ndarray:
    positions = jnp.broadcast_to(jnp.arange(TOKENS.shape[1]), TOKENS.shape)
    model = policy.bind(params)
    return np.asarray(model.logits(model(TOKENS, positions)[0]))[..., : policy.config.vocab_size]


def their_logits(model: torch.nn.Module) -> np.ndarray:
    return logits(model.float().eval(), torch.from_numpy(TOKENS)).numpy()
