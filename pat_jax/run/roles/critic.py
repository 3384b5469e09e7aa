"""The critic of a run: which model it is, and the parameters that it begins with.

Knows options, checkpoints and trainers. Does not know what the critic learns.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from pat_jax.common.devices import Device
from pat_jax.common.errors import UserError
from pat_jax.common.hub import local_checkpoint
from pat_jax.common.owners import is_absent
from pat_jax.common.pytree import without_shards
from pat_jax.common.rules import require
from pat_jax.config.critic import critic_source
from pat_jax.config.run import RunConfig
from pat_jax.engine.sizing.draft_choice import checkpoint_shape
from pat_jax.engine.sizing.draft_vocabulary import other_tokens, tokens_in
from pat_jax.engine.warm_up.kernel_check import with_usable_kernels
from pat_jax.layout.chain import least_tp
from pat_jax.layout.layout import Layout
from pat_jax.layout.mesh import padded_for
from pat_jax.models.adapted_weight import is_adapted
from pat_jax.models.checkpoints.hf_load import load_params
from pat_jax.models.config import PADDING, ModelConfig
from pat_jax.models.policy import Params, Policy
from pat_jax.rl.algorithm.update import TrainState
from pat_jax.run.checkpoints.files import CHECKPOINTS
from pat_jax.run.roles.adapters import identity, initial_policy
from pat_jax.training.build import DTYPES
from pat_jax.training.build_roles import CriticModel
from pat_jax.training.rest import copied_to
from pat_jax.training.roles import Roles

CRITIC_BASE = "critic_base_checksum"  # in a checkpoint's metadata


def critic_model(
    config: RunConfig, policy: Policy, layout: Layout, devices: Sequence[Device]
) -> CriticModel | None:
    """Returns the critic's model, layout and source; None if the run has no critic.

    Args:
      layout: the policy's, whose micro-batches the critic reads, too.
      devices: the critic's.

    Raises:
      UserError: the critic's model is none, or has other tokens or a shorter context than the
        policy.
    """
    if not (config.train and config.algorithm.has_critic):
        return None
    source = _source(config)
    if not source:
        of_values = Policy.from_config(replace(policy.config, head="scalar"))
        is_there = set(devices) == layout.devices
        own = layout if is_there else _layout(config, of_values.config, devices)
        return CriticModel(of_values, own)
    option = "critic.model" if config.critic.model else "reward"
    shape = checkpoint_shape(source, option, head="scalar")
    if shape is None:
        raise UserError(
            f"option --{option} is {source!r}: expected a Hugging Face checkpoint directory or a model of "
            "the Hub as owner/name, but there is no such directory."
        )
    _check_tokens(config, shape, source, policy.config)
    model = padded_for(devices, shape)
    own = _layout(config, model, devices)
    require(
        own.split == layout.split or len(devices) != layout.mesh.devices.size,
        "critic.model",
        source,
        f"a model that divides over the devices as the policy does, {layout.split}, and not {own.split}",
    )
    return CriticModel(Policy.from_config(model), own, source)


def _source(config: RunConfig) -> str:
    return critic_source(config.critic.model, config.reward, config.model)


def _check_tokens(config: RunConfig, shape: ModelConfig, source: str, policy: ModelConfig) -> None:
    """Raises OptionError if token ids do not mean the same to the critic as to the policy, or if it
    does not take sequences as long."""
    expected = other_tokens(shape, source, policy, config.model, "critic")
    known = tokens_in(config.model)
    if not expected and known and max(known) >= shape.vocab_size:
        expected = f"a model that embeds the policy's {max(known) + 1:,} tokens, and this one embeds {shape.vocab_size:,}"
    if not expected and shape.max_position < config.rollout.max_length:
        expected = (
            f"a model for the {config.rollout.max_length:,} tokens of the longest prompt and response together, "
            f"and this one is for {shape.max_position:,}"
        )
    require(
        not expected,
        "critic.model",
        source,
        f"{expected}; take one of the policy's family, or --model itself",
    )


def _layout(config: RunConfig, model: ModelConfig, devices: Sequence[Device]) -> Layout:
    """Returns the layout with the least TP, with kernels that work on these devices."""
    least = least_tp(devices, model, fsdp_size=config.fsdp_size)
    page_size, dtype = config.rollout.page_size, DTYPES[config.compute_dtype]
    return with_usable_kernels(least, model, page_size=page_size, dtype=dtype)


def critic_identity(
    config: RunConfig, critic: CriticModel | None, policy: Policy
) -> Mapping[str, object]:
    """Returns the critic's part of a run's fingerprint: what it has that the policy has not."""
    if critic is None:
        return {}
    of_policy, own = asdict(policy.config), asdict(critic.policy.config)
    other = {k: v for k, v in own.items() if k not in PADDING and v != of_policy[k]}
    named = other | identity(critic.lora(config))
    return {"has_critic": True, **{f"critic.{name}": value for name, value in named.items()}}


def freeze_critic(roles: Roles, config: RunConfig, model: CriticModel | None) -> int | None:
    """Gives the critic the base that its adapters are added to, and returns its checksum. Returns
    None if there is no critic, or one without adapters. The policy has its base already."""
    critic = roles.critic
    if critic is None or model is None or critic.trained.lora is None:
        return None
    trained = critic.trained
    if trained.shares_base:
        return critic.freeze(_by_name(roles.policy.trained.frozen, trained.abstract_frozen))
    if model.source:
        return critic.freeze(_loaded(model, trained.base_shardings, trained.compute_dtype))
    base = initial_policy(roles.policy, config, trained.compute_dtype)
    return critic.freeze(_copied(base, trained.abstract_frozen))


def check_critic_base(meta: Mapping[str, Any], checksum: int | None, config: RunConfig) -> None:
    """Raises UserError if the critic's adapters of a checkpoint, by its `meta`, belong to a base
    with another checksum than `checksum`. Without adapters both are None."""
    if meta.get(CRITIC_BASE) != checksum:
        raise UserError(
            f"the critic's adapters in {Path(config.run_dir) / CHECKPOINTS} are of another base, whose weights "
            f"differ from those of {_source(config) or config.model!r}: give the --critic.model that they were "
            "trained with, or another --run_dir."
        )


def initial_critic(
    roles: Roles, config: RunConfig, model: CriticModel | None, policy: TrainState
) -> dict[str, TrainState]:
    """Returns the critic's first state under the critic's name; an empty dict if the run has no
    critic.

    Args:
      policy: the policy's state at the beginning, after its supervised stage.
    """
    critic = roles.critic
    if critic is None or model is None:
        return {}
    trained = critic.trained
    if trained.lora is not None:
        params = trained.init(config.seed)
    elif model.source:
        params = _loaded(model, trained.shardings, trained.weight_dtype)
    else:
        of_policy = roles.policy.trained
        whole = of_policy.frozen if of_policy.lora else policy.params
        params = _copied(whole, trained.abstract)
    return {critic.name: critic.placement.ended(critic["init_state"](params))}


def _loaded(model: CriticModel, shardings: Params, dtype: jnp.dtype) -> Params:
    folder = local_checkpoint(model.source, option="critic.model")
    return load_params(folder, model.policy, shardings, dtype)


def _copied(params: Params, like: Params) -> Params:
    """Returns copies of these parameters in the form of `like`, zeros where they have none."""
    return copied_to(_by_name(params, like), like)


def _by_name(params: Params, like: Params) -> Params:
    """Returns the tree of `like` with the leaf of the same name of `params`, zeros where that has
    none: of a scalar head that a model without one begins with."""
    flatten = partial(jax.tree_util.tree_flatten_with_path, is_leaf=is_adapted)
    known: dict[Any, Any] = dict(flatten(params)[0])
    named, tree = flatten(like)
    found = [known[at] if at in known else _zeros(x) for at, x in named]
    return jax.tree.unflatten(tree, found)


def _zeros(like: jax.ShapeDtypeStruct) -> jax.Array:
    if like.sharding and is_absent(like.sharding.device_set):
        return without_shards(like)
    return jnp.zeros(like.shape, like.dtype, device=like.sharding)


def with_head_bias(policy: Policy, params: Params) -> tuple[Policy, Params]:
    """Returns a model with a scalar head, adapters attached or not, with a bias of the head. The
    bias is zero if it had none."""
    biased = Policy.from_config(replace(policy.config, head_bias=True))
    return biased, _by_name(params, biased.abstract_params)
