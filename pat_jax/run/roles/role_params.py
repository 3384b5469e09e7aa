"""The parameters that the models of a run begin with: loaded, copied from another model, or new.

The reference never changes: it is saved once, and no checkpoint holds it. Knows checkpoints and
handles of roles. Does not know what is learned.
"""

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import orbax.checkpoint as ocp

from pat_jax.common.errors import UserError
from pat_jax.common.hosts.together import process_group
from pat_jax.common.hub import local_adapter, local_checkpoint
from pat_jax.common.owners import is_absent
from pat_jax.common.pytree import with_sharding, without_shards
from pat_jax.config.lora import LoraConfig
from pat_jax.config.role_table import POLICY, REFERENCE
from pat_jax.models.adapted_weight import is_adapted
from pat_jax.models.checkpoints.hf_load import load_params
from pat_jax.models.checkpoints.peft_adapter import load_adapter
from pat_jax.models.policy import Params
from pat_jax.rl.algorithm.update import TrainState
from pat_jax.run.checkpoints.files import CHECKPOINTS, damage, lacking
from pat_jax.run.checkpoints.orbax_io import MISTAKES, open_writer, read_part, reason
from pat_jax.training.reader import Reader
from pat_jax.training.rest import copied_to
from pat_jax.training.role_model import RoleModel
from pat_jax.training.roles import Roles
from pat_jax.training.trainable_params import Leaves
from pat_jax.training.trainer import Trainer


def loaded(model: RoleModel, shardings: Params, dtype: jnp.dtype, seed: int = 0) -> Params:
    """Returns the weights of a role's source. Those of a built-in shape are random."""
    if is_absent(model.layout.devices):
        return without_shards(with_sharding(model.policy.abstract(dtype), shardings))
    folder = local_checkpoint(model.role.source, option=model.role.option)
    if Path(folder).is_dir():
        return load_params(folder, model.policy, shardings, dtype)
    return model.policy.init(seed, shardings, dtype)


def freeze_bases(roles: Roles, seed: int) -> Mapping[str, int | None]:
    """Gives trained roles with adapters their frozen base models. Returns the checksum of each
    base, by its name in a checkpoint's metadata; None: the whole model is trained."""
    checksums: dict[str, int | None] = {}
    for trainer in reversed(roles.trained):  # the critic may share the policy's
        name = "" if trainer is roles.policy else f"{trainer.name}_"
        has_base = trainer.trained.lora is not None
        base = trainer.freeze(_base(roles, trainer, seed)) if has_base else None
        checksums[f"{name}base_checksum"] = base
    return checksums


def _base(roles: Roles, trainer: Trainer, seed: int) -> Params:
    trained = trainer.trained
    model = roles.models[trainer.title]
    if model.role.source:
        return loaded(model, trained.base_shardings, trained.compute_dtype, seed)
    policy = roles.policy.trained
    if trained.shares_base:
        return by_name(policy.frozen, trained.abstract_frozen)
    origin = loaded(roles.models[POLICY], policy.base_shardings, trained.compute_dtype, seed)
    return _copied(origin, trained.abstract_frozen)


def initial_params(
    model: RoleModel, trainer: Trainer, seed: int, origin: Params | None = None
) -> Leaves:
    """Returns the initial values of the trained parameters: a whole model, or adapters. New
    adapters leave the model unchanged.

    Args:
      origin: the policy's parameters, for a model that begins with them.
    """
    trained = trainer.trained
    asked = model.role.trained
    if trained.lora is None:
        if origin is not None and not model.role.source:
            return _copied(origin, trained.abstract)
        return loaded(model, trained.base_shardings, trained.weight_dtype, seed)
    if asked and isinstance(asked.lora, LoraConfig) and asked.lora.adapter:
        folder = local_adapter(asked.lora.adapter, option="lora.adapter")
        return load_adapter(folder, trained.lora, trainer.shardings)
    return trainer.trained.init(seed)


def initial_states(roles: Roles, policy: TrainState, seed: int) -> dict[str, TrainState]:
    """Returns the first states of trained roles by their names in checkpoints.

    Args:
      policy: the policy's state at the beginning, after its supervised stage.
    """
    states = {}
    if (critic := roles.critic) is not None:
        of_policy = roles.policy.trained
        whole = of_policy.frozen if of_policy.lora else policy.params
        params = initial_params(roles.models[critic.name], critic, seed, whole)
        states[critic.name] = critic.placement.ended(critic["init_state"](params))
    return states | {roles.policy.name: policy}


def load_reader(model: RoleModel, reader: Reader) -> None:
    """Loads the weights of a frozen model into their shards."""
    held = reader.held
    reader.params = loaded(model, held.shardings, held.weight_dtype)


def load_frozen(roles: Roles) -> None:
    """Loads the weights of frozen models that have files of their own."""
    for name, reader in roles.readers.items():
        if (model := roles.models[name]).role.source:
            load_reader(model, reader)


def begin_reference(roles: Roles, run_dir: str, state: TrainState) -> None:
    """Gives the reference, if there is one, the policy's parameters in `state`, and saves them."""
    if (reference := roles.readers.get(REFERENCE)) is not None:
        reference.take(state.params)
        save_reference(run_dir, reference.params)


def resume_reference(roles: Roles, run_dir: str, step: int) -> None:
    """Reads the reference of a resumed run, if it has one.

    Args:
      step: step of the checkpoint that the run resumes from.

    Raises:
      UserError: it cannot be read.
    """
    if (reference := roles.readers.get(REFERENCE)) is not None:
        reference.params = read_reference(run_dir, step, reference.abstract_params)


def _copied(params: Params, like: Params) -> Params:
    """Returns copies of these parameters in the form of `like`, zeros where they have none."""
    return copied_to(by_name(params, like), like)


def by_name(params: Params, like: Params) -> Params:
    """Returns a tree like `like` with the leaves of `params` that have the same names. Leaves that
    `params` lacks, such as a new scalar head, are zeros."""
    flatten = partial(jax.tree_util.tree_flatten_with_path, is_leaf=is_adapted)
    known: dict[Any, Any] = dict(flatten(params)[0])
    named, tree = flatten(like)
    found = [known[at] if at in known else _zeros(x) for at, x in named]
    return jax.tree.unflatten(tree, found)


def _zeros(like: jax.ShapeDtypeStruct) -> jax.Array:
    if like.sharding and is_absent(like.sharding.device_set):
        return without_shards(like)
    return jnp.zeros(like.shape, like.dtype, device=like.sharding)


FOLDER = "reference"  # in the run's folder


def save_reference(run_dir: str, params: Any) -> None:
    """Writes the parameters, and returns when they are on disk. Raises UserError if they cannot be
    written."""
    path = Path(run_dir).absolute() / FOLDER
    num_bytes = sum(leaf.nbytes for leaf in jax.tree.leaves(params))
    room = process_group().agree("room for the reference", lambda: lacking(path.parent, num_bytes))
    if why := room or _written(path, params):
        raise UserError(
            f"the reference policy was not written to {path} ({why}): a resumed run needs it; make room "
            "there, or give another --run_dir."
        )


def _written(path: Path, params: Any) -> str:
    """Writes the parameters. Returns why they were not written, or ""."""
    content = {"state": ocp.args.StandardSave({FOLDER: params}), "meta": ocp.args.JsonSave({})}
    try:
        with open_writer() as writer:
            writer.save(path, args=ocp.args.Composite(**content), force=True)
    except MISTAKES as error:
        return reason(error)[1]
    return ""


def read_reference(run_dir: str, step: int, abstract: Any) -> Any:
    """Returns the parameters in the form of `abstract`. Raises UserError if they cannot be read.

    Earlier versions kept them in each checkpoint. Then they are read from the checkpoint of `step`,
    and saved here, because later checkpoints lack them."""
    path = Path(run_dir).absolute() / FOLDER
    us = process_group()
    if us.agree("whether there is a reference", path.is_dir):
        why = us.agree("the reference's files", lambda: damage(path))
        if why is None:
            return read_part(path, {FOLDER: abstract})[FOLDER]
        raise UserError(f"the reference policy in {path} is damaged ({why}); {_INSTEAD}.")
    try:
        found = read_part(path.with_name(CHECKPOINTS) / str(step), {FOLDER: abstract})[FOLDER]
    except UserError as error:
        raise UserError(
            f"the reference policy of this run is gone: expected the folder {path}; {_INSTEAD}."
        ) from error
    save_reference(run_dir, found)
    return found


_INSTEAD = "it was saved once, when the run began: copy that folder back, or begin anew with another --run_dir"
