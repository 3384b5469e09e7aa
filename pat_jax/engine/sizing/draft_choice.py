"""Chooses the drafter of an engine by its options and devices.

Knows sizes. Does not know when drafts are made: the planner decides that.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import jax.numpy as jnp

from pat_jax.common.hub import local_checkpoint
from pat_jax.common.rules import OptionError, require
from pat_jax.config.speculation import EXIT, MODEL, SpeculationConfig
from pat_jax.engine.device.draft.drafter import Drafter
from pat_jax.engine.device.draft.drafters import NO_DRAFTER, drafter_for
from pat_jax.engine.sizing.draft_vocabulary import other_tokens
from pat_jax.layout.buckets import NO_DRAFTS, Drafts
from pat_jax.models.checkpoints.hf_config import read_config
from pat_jax.models.checkpoints.hf_load import check_checkpoint, load_params
from pat_jax.models.config import Head, ModelConfig
from pat_jax.models.policy import Params, Policy
from pat_jax.models.presets import PRESETS, preset

# So many tokens in a step take about as long to compute as the weights take to read. In bfloat16,
# 990 TFLOP/s over 3.35 TB/s of an H100 and 197 over 0.82 of a TPU v5e are some 300 and 240 tokens.
ON_ACCELERATORS = 256
ON_CPU = 64
TEXTS_ROOM = 4  # room for other responses that a row drafts from, in context lengths


@dataclass(frozen=True)
class DraftChoice:
    drafter: Drafter
    reason: str  # for the log


def drafts_of(config: SpeculationConfig, platform: str) -> Drafts:
    """Returns the drafts that the options ask for, whether they pay or not."""
    if config.source == "none":
        return NO_DRAFTS
    return Drafts(
        config.num_draft_tokens,
        config.longest,
        ON_CPU if platform == "cpu" else ON_ACCELERATORS,
        texts=0 if config.is_generated else TEXTS_ROOM,
        exit_layer=config.exit_layer,
        has_model=config.draft_model != "",
        cache_tokens=config.cache_tokens,
    )


def checkpoint_of(draft_model: str) -> ModelConfig:
    """Returns the configuration in a checkpoint's folder. Raises UserError if there is no such
    folder."""
    expected = f"{MODEL}DIR with the folder of a checkpoint, but this folder does not exist; check the path"
    shape = checkpoint_shape(draft_model, "speculation.source")
    if shape is None:
        raise OptionError("speculation.source", MODEL + draft_model, expected)
    return shape


def drafter_of(
    config: SpeculationConfig,
    model: ModelConfig,
    platform: str,
    max_length: int,
    configuration: Callable[[str], ModelConfig] = checkpoint_of,
    *,
    folder: str = "",
) -> Drafter:
    """Returns the drafter that the options ask for, whether its drafts pay or not. Raises UserError
    if the early-exit layer is the policy's last or does not exist. Raises it, too, if the draft
    model has another vocabulary or too short a context.

    Args:
      model: the policy's configuration.
      platform: the value of `jax.Device.platform`.
      max_length: tokens of the longest prompt and response.
      configuration: returns the configuration of a named draft model.
      folder: folder of the policy's checkpoint; without one, no tokenizers are compared.
    """
    drafts = drafts_of(config, platform)
    if drafts.exit_layer:
        num_layers = model.num_layers
        expected = (
            f"{EXIT}LAYER with a layer from 1 to {num_layers - 1}, because the model has {num_layers} layers"
            if num_layers > 1
            else f"suffix or {MODEL}DIR, because the model has only one layer and cannot exit before it"
        )
        is_before_the_last = drafts.exit_layer < num_layers
        require(is_before_the_last, "speculation.source", config.source, expected)
    if not drafts.has_model:
        return drafter_for(drafts)
    own = configuration(config.draft_model)
    _check_draft_model(config, own, model, max_length, folder)
    policy = Policy.from_config(own)
    return drafter_for(drafts, policy, partial(_load, config.draft_model, policy))


def _load(name: str, policy: Policy, shardings: Params, dtype: jnp.dtype) -> Params:
    folder = local_checkpoint(name, option="speculation.source")
    return load_params(folder, policy, shardings, dtype)


def wanted_drafts(
    config: SpeculationConfig, policy: Policy, platform: str, max_length: int, *, folder: str = ""
) -> DraftChoice:
    """Returns the drafter of a run and the reason; `auto` drafts only on accelerators.

    See `drafter_of`.
    """
    if config.source == "none":
        return DraftChoice(NO_DRAFTER, "speculation: none asked for")
    if config.source == "auto" and platform == "cpu":
        return DraftChoice(
            NO_DRAFTER,
            "speculation: none on a CPU, where a step takes longer the more tokens it verifies "
            "(--speculation.source suffix makes drafts)",
        )
    drafter = drafter_of(config, policy.config, platform, max_length, folder=folder)
    words = f"speculation: drafts of up to {_source_words(config, drafter, policy.config)}"
    return DraftChoice(drafter, f"{words}, where they are predicted to pay")


def _source_words(config: SpeculationConfig, drafter: Drafter, model: ModelConfig) -> str:
    drafts = drafter.drafts
    own = drafter.policy
    if not drafts.is_generated:
        others = " and others to its prompt" * (drafts.texts > 0)
        return f"{drafts.longest} tokens from a response's own text{others}"
    proposed_by = f"the first {drafts.exit_layer} of {model.num_layers} layers"
    if own is not None:
        proposed_by = f"{config.draft_model} ({own.config.num_layers} layers)"
    return f"{drafts.num_draft_tokens[-1]} tokens, proposed by {proposed_by}"


def shape_of(draft_model: str) -> ModelConfig:
    """Returns the configuration of a checkpoint or a built-in shape, for plans and replays. Raises
    UserError if the name is neither."""
    if shape := checkpoint_shape(draft_model, "speculation.source"):
        return shape
    expected = f"{MODEL} and the folder of a checkpoint, or a built-in shape ({', '.join(PRESETS)})"
    require(draft_model in PRESETS, "speculation.source", MODEL + draft_model, expected)
    return preset(draft_model)


def checkpoint_shape(name: str, option: str, head: Head | None = "vocab") -> ModelConfig | None:
    """Returns the configuration of a checkpoint's folder or a Hub model; None if it is neither.

    The weights of a Hub model are not downloaded.

    Args:
      head: the head that the model is to have, see `read_config`.
    """
    folder = local_checkpoint(name, option=option, weights=False)
    if not Path(folder).is_dir():
        return None
    return check_checkpoint(folder, head) if folder == name else read_config(folder, head)


def _check_draft_model(
    config: SpeculationConfig, own: ModelConfig, policy: ModelConfig, max_length: int, folder: str
) -> None:
    asked = "speculation.source"
    expected = other_tokens(own, config.draft_model, policy, folder)
    require(not expected, asked, config.source, f"{expected}; choose a model of the same family")
    require(
        own.max_position >= max_length,
        asked,
        config.source,
        f"a draft model with a context of {max_length} tokens, the longest prompt and response together, but "
        f"this one has {own.max_position}; choose another model or lower the longest lengths",
    )
