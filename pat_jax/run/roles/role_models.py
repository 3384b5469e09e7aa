"""Finds the models of roles in their files, and chooses their layouts. They have to fit the policy.

Knows checkpoints' headers and tokenizers. Does not know weights, nor what models predict.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import jax.numpy as jnp

from pat_jax.common.devices import Device
from pat_jax.common.errors import UserError
from pat_jax.common.rules import require
from pat_jax.config.role_table import CRITIC, TEACHER, Role
from pat_jax.engine.sizing.draft_choice import checkpoint_shape, other_tokens, tokens_in
from pat_jax.engine.warm_up.kernel_check import with_usable_kernels
from pat_jax.layout.chain import layout_chain
from pat_jax.layout.layout import Layout
from pat_jax.layout.mesh import factored_mesh, padded_for
from pat_jax.models.config import ModelConfig
from pat_jax.models.policy import Policy
from pat_jax.planning.types import Split
from pat_jax.training.build import DTYPES
from pat_jax.training.role_model import RoleModel

# Of the models that read the policy's batches: which others fit its tokens, what is longest, and
# what helps if the context is too short.
_ADVICE = {
    CRITIC: (
        "take one of the policy's family, or --model itself",
        "the {:,} tokens of the longest prompt and response together",
        "take one of the policy's family, or --model itself",
    ),
    TEACHER: (
        "take a teacher of the same family",
        "texts of {:,} tokens, the longest prompt and response",
        "take another, or allow shorter ones",
    ),
}


@dataclass(frozen=True)
class Division:
    """Options that decide how models that do not decode are divided over devices."""

    page_size: int
    fsdp_size: int = 0


def layout_of(
    model: ModelConfig,
    devices: Sequence[Device],
    dtype: jnp.dtype,
    division: Division,
    like: Split | None = None,
) -> Layout:
    """Returns the layout with the least TP, or that of the split `like` if it divides the model,
    with the kernels that work on these devices."""
    chain, _ = layout_chain(factored_mesh(devices), model, fsdp_size=division.fsdp_size)
    least = next(iter(chain.values()))
    layout = chain.get(like, least) if like else least
    return with_usable_kernels(layout, model, page_size=division.page_size, dtype=dtype)


def model_of(
    role: Role, policy: RoleModel, devices: Sequence[Device], division: Division, longest: int
) -> RoleModel:
    """Returns the model of a role that reads the policy's batches.

    Args:
      devices: the role's devices.
      longest: tokens of the longest prompt and response.

    Raises:
      UserError: there is no such model, or it does not fit the policy: its tokens, its context or
        its heads.
    """
    of_policy = policy.policy.config
    split = policy.layout.split
    shape = replace(of_policy, head=role.head)
    if role.source:
        shape = padded_for(devices, _fitting_shape(role, policy, longest))
    if role.name == TEACHER and shape.padded_vocab_size < of_policy.padded_vocab_size:
        # Every token that the policy may sample has a logit, if only that of padding.
        shape = replace(shape, vocab_multiple=of_policy.padded_vocab_size)
    own = policy.policy if shape == of_policy else Policy.from_config(shape)
    if not role.source and set(devices) == policy.layout.devices:
        return RoleModel(role, own, policy.layout)
    # On as many devices as the policy has, a model splits the rows of micro-batches as it does.
    like = split if len(devices) == policy.layout.mesh.size else None
    layout = layout_of(shape, devices, DTYPES[role.compute.dtype], division, like)
    require(
        like is None or layout.split == split,
        f"{role.name}.model",
        role.source,
        f"a model that divides over the devices as the policy does, {split}, and not {layout.split}",
    )
    return RoleModel(role, own, layout)


def _fitting_shape(role: Role, policy: RoleModel, longest: int) -> ModelConfig:
    """Returns the shape of the model in a role's files. Raises UserError if there is none, or if it
    cannot read the policy's tokens."""
    shape = checkpoint_shape(role.source, role.option, head=role.head)
    if shape is None:
        raise UserError(
            f"option --{role.option} is {role.source!r}: expected a Hugging Face checkpoint directory or a model of "
            "the Hub as owner/name, but there is no such directory."
        )
    option = f"{role.name}.model"
    other, texts, shorter = _ADVICE[role.name]
    tokens = _other_tokens(role, shape, policy)
    require(not tokens, option, role.source, f"{tokens}; {other}")
    require(
        shape.max_position >= longest,
        option,
        role.source,
        f"a model for {texts.format(longest)}, and this one is for {shape.max_position:,}; {shorter}",
    )
    most = min(policy.policy.config.vocab_size, shape.vocab_size)
    expected = f"at most {most:,}, the tokens of the vocabulary"
    require(role.top_k <= most, f"{role.name}.top_k", role.top_k, expected)
    return shape


def _other_tokens(role: Role, shape: ModelConfig, policy: RoleModel) -> str:
    """Returns why token ids do not mean the same to a model as to the policy, in words; empty if
    they do.

    Unlike a draft model, a model that reads responses has to know every token of the policy."""
    folder = policy.role.source
    if why := other_tokens(shape, role.source, policy.policy.config, folder, role.name):
        return why
    tokens = tokens_in(role.source)
    of_policy = tokens_in(folder)
    if not of_policy:
        return ""
    if role.name == CRITIC and max(of_policy) >= shape.vocab_size:
        return f"a model that embeds the policy's {max(of_policy) + 1:,} tokens, and this one embeds {shape.vocab_size:,}"
    unknown = of_policy.keys() - tokens.keys() if tokens is not None else set()
    if role.name != TEACHER or not unknown:
        return ""
    first = min(unknown)
    return (
        f"a model with the tokens of {folder}, whose token {first} is {of_policy[first]!r}, which this "
        "one does not have"
    )
