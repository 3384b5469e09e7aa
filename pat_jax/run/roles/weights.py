"""Loads the weights of an engine that only generates: from a checkpoint directory (with a PEFT
adapter), from a run's checkpoint, or random ones of a built-in shape.

Knows files and layouts. Does not know what is generated. Mistakes in files are found before
anything is compiled, so that loading later does not fail.
"""

from collections.abc import Callable
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array

from pat_jax.common.hub import is_checkpoint, local_adapter, local_checkpoint
from pat_jax.common.pytree import with_sharding
from pat_jax.common.rules import require
from pat_jax.layout.layout import Layout
from pat_jax.models.adapted_weight import AdaptedWeight
from pat_jax.models.checkpoints.hf_load import check_checkpoint, load_params
from pat_jax.models.checkpoints.peft_adapter import load_adapter, read_adapter
from pat_jax.models.config import Head, ModelConfig
from pat_jax.models.lora import Lora
from pat_jax.models.policy import Params, Policy
from pat_jax.models.weight_formats import QuantizedWeight, is_quantized, stored
from pat_jax.run.roles.fingerprint import check_base
from pat_jax.run.roles.saved_policy import SavedPolicy
from pat_jax.training.build import DTYPES
from pat_jax.training.checksum import base_checksum
from pat_jax.training.trainable_params import Leaves

# Loads a policy's weights in a layout. Weights that are not quantized have the given data type.
Load = Callable[[jnp.dtype, Policy, Layout], Params]


def check_weights(model: str, option: str = "model", head: Head | None = "vocab") -> None:
    """Downloads the weights of a model of the Hub, and checks them; the weights of a directory were
    checked with its shape. Call it last: it may download many gigabytes. Raises UserError if they
    cannot be downloaded, or do not fit its config.json or `head` (see `read_config`)."""
    folder = local_checkpoint(model, option=option)
    if folder != model:
        check_checkpoint(folder, head)


def weights_of_model(name: str, model: ModelConfig, adapter: str, seed: int) -> Load:
    """Returns a loader of the weights of `name`, the --model, with --adapter merged if it is given.
    The weights of a built-in shape are random, by `seed`. Raises UserError if the weights or the
    adapter cannot be used, or if the adapter belongs to another model."""
    if not adapter:
        check_weights(name)
        return partial(_load_model, name, seed)
    require(
        is_checkpoint(name),
        "adapter",
        adapter,
        f"none with --model {name!r}: adapters are added to a Hugging Face checkpoint directory",
    )
    adapter = local_adapter(adapter)
    lora = read_adapter(adapter, Policy.from_config(model))
    check_weights(name)
    return partial(_load_adapted, name, adapter, lora)


def weights_of_run(
    name: str, saved: SavedPolicy, policy: Policy, layout: Layout, seed: int
) -> Load:
    """Returns a loader of the weights of a run's checkpoint. Adapters are merged into their base,
    the model `name`, whose unquantized policy is `policy`. Raises UserError if this is not the base
    that they were trained on; to check it, the base is loaded in `layout`."""
    if saved.lora(policy):
        base = _spread(name, policy, layout, DTYPES[saved.compute_dtype])
        found = base_checksum(policy, base)
        check_base(saved.meta, found, str(saved.run), name, seed)
    return partial(_load_saved, name, saved)


def _load_model(name: str, seed: int, dtype: jnp.dtype, policy: Policy, layout: Layout) -> Params:
    shardings = layout.param_shardings(policy)
    if Path(folder := local_checkpoint(name)).is_dir():
        return load_params(folder, policy, shardings, dtype)
    return policy.init(seed, shardings, dtype)


def _load_adapted(
    model: str, adapter: str, lora: Lora, dtype: jnp.dtype, policy: Policy, layout: Layout
) -> Params:
    base = _spread(model, lora.policy, layout, jnp.dtype(jnp.float32))
    shardings: Leaves = layout.param_shardings(lora, role="train")
    adapters = load_adapter(adapter, lora, shardings)
    return _kept(lora.attach(base, adapters), dtype, policy, layout)


def _load_saved(
    model: str, saved: SavedPolicy, dtype: jnp.dtype, policy: Policy, layout: Layout
) -> Params:
    whole = policy.with_weights("auto")
    lora = saved.lora(whole)
    trained = lora or whole
    shardings = layout.param_shardings(trained, role="train")
    params = saved.read(with_sharding(trained.abstract_params, shardings))
    if lora:  # the base in the data type that the run used
        params = lora.attach(_spread(model, whole, layout, DTYPES[saved.compute_dtype]), params)
    return _kept(params, dtype, policy, layout)


def _spread(model: str, policy: Policy, layout: Layout, dtype: jnp.dtype) -> Params:
    """Loads the policy of a model, sharded over all devices as a trainer has it."""
    shardings = layout.param_shardings(policy, role="train")
    return load_params(local_checkpoint(model), policy, shardings, dtype)


def _kept(spread: Params, dtype: jnp.dtype, policy: Policy, layout: Layout) -> Params:
    """Converts weights with a trainer's sharding to the format of `policy` in `layout`, merging
    adapters. Converts leaf by leaf, and deletes each converted leaf."""

    def put(like: Any, x: Array | AdaptedWeight, sharding: Any) -> Array | QuantizedWeight:
        kept = jax.block_until_ready(_keep(like, sharding, jnp.dtype(dtype))(x))
        for part in jax.tree.leaves(x):
            part.delete()
        return kept

    trees = spread, layout.param_shardings(policy)
    return jax.tree.map(put, policy.abstract_params, *trees, is_leaf=is_quantized)


@lru_cache
def _keep(
    like: jax.ShapeDtypeStruct | QuantizedWeight, sharding: Any, dtype: jnp.dtype
) -> Callable[[Any], Array | QuantizedWeight]:
    """Returns the compiled conversion of a leaf. It always copies, as its input is deleted."""

    def keep(x: Array | AdaptedWeight) -> Array | QuantizedWeight:
        return stored(x.merged() if isinstance(x, AdaptedWeight) else jnp.copy(x), like, dtype)

    return jax.jit(keep, out_shardings=sharding)
