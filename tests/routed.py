"""A small model with experts, responses with recorded experts, and what its own forward pass says of them."""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from pat_jax.models.config import ExpertsConfig, ModelConfig
from pat_jax.models.policy import Params, Policy
from pat_jax.rl.batches.batches import to_read_batch
from pat_jax.rl.batches.train_batch import NOT_RECORDED, TrainBatch
from pat_jax.rl.batches.types import FinishReason, Prompt, Rollout
from tests.lossless import EXPERTS

# A layer is enough: compiling takes as long as there are layers.
CONFIG = replace(EXPERTS["moe"], num_layers=1, experts=ExpertsConfig(8, 2, 16))
SHAPE = (8, 32)
TEMPERATURE = 0.7


def recorded_rollouts(config: ModelConfig = CONFIG) -> list[Rollout]:
    """Two responses to each of four prompts, computed by experts that no router would choose."""
    rng, rollouts = np.random.default_rng(0), []
    for number in range(4):
        prompt = Prompt(number, tuple(rng.integers(3, 61, 4 + number).tolist()), "", {})
        for sample in range(2):
            tokens = rng.integers(3, 61, 6 + 7 * sample, np.int32)
            layers, k = config.routes_shape
            known = len(prompt.tokens) + len(tokens) - 1, layers, 8
            routes = np.argsort(rng.random(known))[..., :k].astype(np.int16)
            logprobs = np.full(len(tokens), -4, np.float32)
            done = FinishReason.STOP
            rollouts.append(Rollout(prompt, sample, tokens, logprobs, done, None, routes))
    return rollouts


def read_batch(rollouts: Sequence[Rollout]) -> TrainBatch:
    return to_read_batch(rollouts, [SHAPE])


def own_logprobs(
    policy: Policy, params: Params, rollouts: Sequence[Rollout], *, by_recorded: bool = False
) -> list[np.ndarray]:
    """log π of each response's tokens, one sequence at a time: no mesh, no batch.

    Args:
      by_recorded: by the experts that were recorded; else routers choose.
    """
    found = []
    for one in rollouts:
        tokens = np.zeros(SHAPE[1], np.int32)
        whole = [*one.prompt.tokens, *one.tokens]
        tokens[: len(whole)] = whole
        routes = np.full((len(tokens), *policy.config.routes_shape), NOT_RECORDED, np.int16)
        if by_recorded:
            assert one.routed_experts is not None
            routes[: len(one.routed_experts)] = one.routed_experts
        logits = np.asarray(_logits(policy.config, params, tokens, routes), np.float64)
        logits /= TEMPERATURE
        logprobs = logits - np.logaddexp.reduce(logits, axis=-1, keepdims=True)
        first = len(one.prompt.tokens) - 1
        found.append(logprobs[first + np.arange(len(one.tokens)), one.tokens])
    return found


@partial(jax.jit, static_argnums=0)
def _logits(config: ModelConfig, params: Params, tokens: jax.Array, routes: jax.Array) -> jax.Array:
    model = Policy.from_config(config).bind(params)
    positions = jnp.arange(len(tokens))[None]
    hidden, *_ = model(tokens[None], positions, recorded=routes[None])
    return model.logits(hidden)[0, :, : config.vocab_size]
