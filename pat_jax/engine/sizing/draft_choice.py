"""Chooses the drafter of an engine by its options and devices.

Also checks that token ids mean the same to a draft model as to the policy. Knows sizes, and files
of tokenizers. Does not know when drafts are made: the planner decides that.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import jax.numpy as jnp

from pat_jax.common.errors import UserError
from pat_jax.common.hub import local_checkpoint
from pat_jax.common.json_text import read_json_object
from pat_jax.common.rules import OptionError, require
from pat_jax.config.speculation import EXIT, MODEL, SpeculationConfig
from pat_jax.engine.device.draft.drafter import Drafter
from pat_jax.engine.device.draft.drafters import NO_DRAFTER, drafter_for
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
TOKENIZER_FILE = "tokenizer.json"
# Models with one tokenizer pad their embeddings to multiples of 64 to 512: those of Qwen2.5-7B have
# 152,064 rows, those of Qwen2.5-0.5B 151,936, and both tokenizers 151,665 tokens. If the vocabulary
# is small, so small a difference means other tokens.
PADDED_TO = 512
PADDED_FROM = 16 * 512


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


def other_tokens(
    own: ModelConfig,
    own_folder: str,
    policy: ModelConfig,
    policy_folder: str,
    kind: str = "draft model",
) -> str:
    """Returns why a draft model's token ids do not fit the policy's; empty if they do. Raises
    UserError if a tokenizer's file cannot be read.

    If both models have a tokenizer, the ids that both have are compared. Sizes of embeddings do not
    matter then. An id that only the policy has is never proposed. One that only the draft model has
    is never sampled. Without tokenizers, sizes may differ only by padding, see `is_padding_alone`.

    Args:
      own, own_folder: the draft model's configuration and checkpoint folder.
      policy, policy_folder: the same of the policy. Without a folder there is no tokenizer.
      kind: what the draft model is called in the message.
    """
    tokens, of_policy = tokens_in(own_folder), tokens_in(policy_folder)
    if tokens is None or of_policy is None:
        if is_padding_alone(own.vocab_size, policy.vocab_size):
            return ""
        return f"a {kind} with the policy's {policy.vocab_size} tokens, but this one has {own.vocab_size}"
    shared = tokens.keys() & of_policy.keys()
    if not shared:
        return f"a {kind} with the tokens of {policy_folder}, but they have no token id in common"
    first = min((i for i in shared if tokens[i] != of_policy[i]), default=None)
    if first is None:
        return ""
    return (
        f"a {kind} with the tokens of {policy_folder}, but token {first} is {of_policy[first]!r} there and "
        f"{tokens[first]!r} in the {kind}"
    )


def is_padding_alone(one: int, other: int) -> bool:
    """Returns whether two models with these numbers of embedding rows may have the same tokens.

    Their sizes must be equal, or differ by less than usual padding in a large vocabulary
    (`PADDED_TO`)."""
    return one == other or (abs(one - other) < PADDED_TO and min(one, other) >= PADDED_FROM)


def tokens_in(folder: str) -> Mapping[int, str] | None:
    """Returns the token of each id in a checkpoint's tokenizer, added tokens included. Returns None
    if there is no tokenizer file. Raises UserError if the file cannot be read."""
    path = Path(local_checkpoint(folder, weights=False)) / TOKENIZER_FILE
    if not path.is_file():
        return None
    told = read_json_object(path)
    try:
        return {number: token for token, number in _numbered(told)}
    except (AttributeError, KeyError, TypeError, ValueError):
        raise UserError(
            f"{path} lists no tokens with their ids: expected a vocabulary and added tokens in the format of Hugging "
            "Face tokenizers; download the file again."
        ) from None


def _numbered(told: Mapping[str, Any]) -> list[tuple[str, int]]:
    vocabulary = told["model"]["vocab"]
    if isinstance(vocabulary, list):  # a unigram model: tokens with their scores, in order of ids
        found = [(token, number) for number, (token, _) in enumerate(vocabulary)]
    else:
        found = list(vocabulary.items())
    return found + [(one["content"], one["id"]) for one in told.get("added_tokens") or ()]
