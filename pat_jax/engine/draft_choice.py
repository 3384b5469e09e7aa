"""Which drafts the bursts of an engine may verify, by its options and its devices.

Knows sizes. Does not know when drafts are made: that is the planner's.
"""

import math
from dataclasses import dataclass

import jax
import jax.numpy as jnp

from pat_jax.common.rules import require
from pat_jax.config.speculation import SpeculationConfig
from pat_jax.engine.layout.buckets import NO_DRAFTS, Drafts
from pat_jax.models.policy import Policy

# A step with so many tokens takes about as long to compute as to read the weights: bfloat16 on an H100,
# 990 TFLOP/s over 3.35 TB/s, and on a TPU v5e, 197 over 0.82, are some 300 and 240 tokens.
ON_ACCELERATORS, ON_CPU = 256, 64
SMALL_ON_CPU = 50_000_000  # parameters: weights that stay in a CPU's caches are read for nothing


@dataclass(frozen=True)
class DraftChoice:
    drafts: Drafts
    reason: str  # for the log


def drafts_of(config: SpeculationConfig, platform: str) -> Drafts:
    """Those that are asked for, whether they pay or not."""
    if config.source == "none":
        return NO_DRAFTS
    most = config.most_tokens or (ON_CPU if platform == "cpu" else ON_ACCELERATORS)
    texts = 0 if config.exit_layer else config.texts
    return Drafts(config.budgets, config.longest, most, texts, config.exit_layer)


def wanted_drafts(config: SpeculationConfig, policy: Policy, platform: str) -> DraftChoice:
    """
    Args:
      platform: as `jax.Device.platform` has it.

    Raises:
      UserError: a layer is to draft that the policy has not, or its last one.
    """
    if config.source == "none":
        return DraftChoice(NO_DRAFTS, "speculation: none asked for")
    parameters = sum(math.prod(x.shape) for x in jax.tree.leaves(policy.abstract(jnp.float32)))
    if config.source == "auto" and platform == "cpu" and parameters < SMALL_ON_CPU:
        return DraftChoice(
            NO_DRAFTS,
            f"speculation: none for {parameters / 1e6:.1f} M parameters on a CPU, where a step takes "
            "longer the more tokens it verifies (--speculation.source suffix makes drafts)",
        )
    drafts, layers = drafts_of(config, platform), policy.config.num_layers
    if drafts.exit_layer:
        require(
            drafts.exit_layer < layers,
            "speculation.source",
            config.source,
            f"a layer from 1 to {layers - 1} behind early_exit:, for a model of {layers} layers",
        )
        reason = (
            f"speculation: drafts of up to {drafts.budgets[-1]} tokens, said by the first "
            f"{drafts.exit_layer} of {layers} layers, where they are predicted to pay"
        )
        return DraftChoice(drafts, reason)
    return DraftChoice(
        drafts,
        f"speculation: drafts of up to {drafts.longest} tokens from a response's own text"
        + " and others to its prompt" * (drafts.texts > 0)
        + ", where they are predicted to pay",
    )
