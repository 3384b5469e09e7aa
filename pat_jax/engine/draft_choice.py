"""Which drafts the bursts of an engine may verify, by its options and its devices.

Knows sizes. Does not know when drafts are made: that is the planner's.
"""

import math
from dataclasses import dataclass

import jax
import jax.numpy as jnp

from pat_jax.common.rules import require
from pat_jax.config.speculation import SpeculationConfig
from pat_jax.engine.draft_memory import Drafter
from pat_jax.engine.layout.buckets import NO_DRAFTS, Drafts
from pat_jax.models.config import ModelConfig
from pat_jax.models.hf_load import check_checkpoint
from pat_jax.models.policy import Policy

# A step with so many tokens takes about as long to compute as to read the weights: bfloat16 on an H100,
# 990 TFLOP/s over 3.35 TB/s, and on a TPU v5e, 197 over 0.82, are some 300 and 240 tokens.
ON_ACCELERATORS, ON_CPU = 256, 64
SMALL_ON_CPU = 50_000_000  # parameters: weights that stay in a CPU's caches are read for nothing


@dataclass(frozen=True)
class DraftChoice:
    drafts: Drafts
    reason: str  # for the log
    policy: Policy | None = None  # of a draft model

    @property
    def drafter(self) -> Drafter:
        return Drafter(self.drafts, self.policy)


def drafts_of(config: SpeculationConfig, platform: str) -> Drafts:
    """Those that are asked for, whether they pay or not."""
    if config.source == "none":
        return NO_DRAFTS
    most = config.most_tokens or (ON_CPU if platform == "cpu" else ON_ACCELERATORS)
    is_said = config.exit_layer > 0 or config.draft_model != ""
    texts = 0 if is_said else config.texts
    has_model = config.draft_model != ""
    sizes = config.budgets, config.longest, most, texts
    return Drafts(*sizes, config.exit_layer, has_model, config.stagger)


def wanted_drafts(
    config: SpeculationConfig, policy: Policy, platform: str, max_length: int
) -> DraftChoice:
    """
    Args:
      platform: as `jax.Device.platform` has it.
      max_length: tokens of the longest prompt and response.

    Raises:
      UserError: a layer is to draft that the policy has not, or its last one; or a model of another
        vocabulary or for shorter texts.
    """
    if config.source == "none":
        return DraftChoice(NO_DRAFTS, "speculation: none asked for")
    drafts, layers = drafts_of(config, platform), policy.config.num_layers
    parameters = sum(math.prod(x.shape) for x in jax.tree.leaves(policy.abstract(jnp.float32)))
    if config.source == "auto" and platform == "cpu" and parameters < SMALL_ON_CPU:
        return DraftChoice(
            NO_DRAFTS,
            f"speculation: none for {parameters / 1e6:.1f} M parameters on a CPU, where a step takes "
            "longer the more tokens it verifies (--speculation.source suffix makes drafts)",
        )
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
    if drafts.has_model:
        own = _draft_model(config, policy, max_length)
        reason = (
            f"speculation: drafts of up to {drafts.budgets[-1]} tokens, said by {config.draft_model} "
            f"({own.num_layers} layers), where they are predicted to pay"
        )
        return DraftChoice(drafts, reason, Policy.from_config(own))
    return DraftChoice(
        drafts,
        f"speculation: drafts of up to {drafts.longest} tokens from a response's own text"
        + " and others to its prompt" * (drafts.texts > 0)
        + ", where they are predicted to pay",
    )


def _draft_model(config: SpeculationConfig, policy: Policy, max_length: int) -> ModelConfig:
    own = check_checkpoint(config.draft_model)
    vocabulary, asked = policy.config.vocab_size, "speculation.source"
    require(
        own.vocab_size == vocabulary,
        asked,
        config.source,
        f"a model with the policy's {vocabulary} tokens, and this one has {own.vocab_size}; take one of "
        "the same family",
    )
    require(
        own.max_position >= max_length,
        asked,
        config.source,
        f"a model for texts of {max_length} tokens, the longest prompt and response, and this one is for "
        f"{own.max_position}; take another, or allow shorter ones",
    )
    return own
