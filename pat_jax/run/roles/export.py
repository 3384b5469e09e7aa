"""Exports a run's models as Hugging Face directories, or the policy's adapters as a PEFT directory.

Knows the run's folder and the export's. Does not know the formats
(`models/checkpoints/hf_export.py`, `models/checkpoints/peft_adapter.py`).
"""

import json
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax

from pat_jax.common.devices import Device
from pat_jax.common.errors import UserError
from pat_jax.common.files import replace_text
from pat_jax.common.hosts.together import process_group
from pat_jax.common.hub import is_checkpoint, local_checkpoint
from pat_jax.common.json_text import parse_json
from pat_jax.common.owners import is_absent, owners
from pat_jax.common.pytree import on_host
from pat_jax.common.rules import require
from pat_jax.config.lora import LoraConfig
from pat_jax.config.role_table import CRITIC, POLICY
from pat_jax.models.checkpoints.hf_export import attend, check_export, export
from pat_jax.models.checkpoints.peft_adapter import export_adapter
from pat_jax.models.policy import Policy
from pat_jax.run.roles.role_params import by_name
from pat_jax.training.rest import fetched
from pat_jax.training.role_model import RoleModel
from pat_jax.training.roles import Roles, States
from pat_jax.training.trainable_params import Leaves, TrainableParams

# In the run's folder: path and step of an export, by the name of its role.
_NOTES = {POLICY: "exported.json", CRITIC: "exported-critic.json"}


def check_export_dirs(folders: Mapping[str, str], run_dir: str, *, resume: bool) -> None:
    """Raises UserError if trained models cannot be written to these folders.

    Args:
      folders: the export's folder of each role, by its name; empty: no export.
    """
    for name, directory in folders.items():
        option = "checkpoint.export_dir" if name == POLICY else f"{name}.export_dir"
        if not directory:
            continue
        if Path(run_dir).absolute().is_relative_to(Path(directory).absolute()):
            raise UserError(
                f"option --{option} is {directory!r}: expected a folder of its own, but the run "
                f"folder {run_dir!r} lies there; choose another, such as one in the run folder."
            )
        if not (resume and _written(Path(run_dir) / _NOTES[name], directory) is not None):
            check_export(directory)
        other = folders[POLICY]
        is_same = bool(other) and Path(directory).absolute() == Path(other).absolute()
        expected = "another folder than --checkpoint.export_dir, which is the policy's"
        require(name == POLICY or not is_same, option, directory, expected)


def export_roles(
    roles: Roles, states: States, step: int, run_dir: str, tokenizer_dir: Path | None
) -> None:
    """Writes the trained models of `step` that the options ask for.

    Args:
      tokenizer_dir: the directory of the tokenizer; None: that of --model, if it has one.

    Raises:
      UserError: a model cannot be written, such as on a full disk.
    """
    base = roles.models[POLICY].role.source
    for trainer in reversed(roles.trained):
        with fetched(states[trainer.name].params, trainer.shardings) as params:
            model = roles.models[trainer.title]
            export_role(
                model,
                trainer.trained,
                params,
                step,
                run_dir,
                base=base,
                tokenizer_dir=tokenizer_dir,
            )


def export_role(
    model: RoleModel,
    held: TrainableParams,
    params: Leaves,
    step: int,
    run_dir: str,
    *,
    base: str,
    tokenizer_dir: Path | None = None,
    padding: tuple[int, str] | None = None,
) -> None:
    """Writes a trained model of `step`, if the options ask for that. An earlier export of this run
    is renamed and stays beside it.

    Args:
      held: the form of the model's parameters, of which the trained ones are `params`.
      base: the model that the run began with, whose tokenizer this one has.
      padding: see `export`; a directory of adapters has no padding.
    """
    role = model.role
    trained = model.role.trained
    if trained is None or not trained.export_dir:
        return
    if isinstance(trained.lora, LoraConfig) and trained.lora.export == "adapter":

        def write(directory: Path, is_writer: bool) -> None:
            host = jax.tree.map(on_host, params)  # by all processes
            if is_writer:
                assert held.lora  # the options were checked
                export_adapter(directory, held.lora, host, base=base)

    else:
        policy = held.policy
        whole = held.whole(held.frozen, params)
        if role.name == CRITIC:  # its head is written with a bias, of zero if it has none
            policy = Policy.from_config(replace(policy.config, head_bias=True))
            whole = by_name(whole, policy.abstract_params)
        if tokenizer_dir is None and is_checkpoint(base):
            tokenizer_dir = Path(local_checkpoint(base, weights=False))
        tokenizer = tokenizer_dir

        def write(directory: Path, is_writer: bool) -> None:
            if is_writer:
                dtype = model.dtype
                export(directory, policy, whole, dtype, tokenizer_dir=tokenizer, padding=padding)
            else:
                attend(policy, whole, model.dtype)

    note = Path(run_dir) / _NOTES[role.name]
    folder = Path(trained.export_dir)
    _export(f"the {role.name}", folder, note, step, write, held.layout.devices)


def _export(
    what: str,
    directory: Path,
    note: Path,
    step: int,
    write: Callable[[Path, bool], None],
    devices: Collection[Device],
) -> None:
    """Writes an export of `step`, if it is not there yet, and notes that in the run's folder.

    Args:
      devices: the model's devices. All processes that own some call `write`; the first of them
        prepares the folder, and writes.
    """
    earlier = process_group().agree("export before", lambda: _written(note, directory))
    if earlier == step or is_absent(devices):
        return
    if process_group().index != owners(devices)[0]:
        write(directory, False)
        return
    try:
        if earlier is not None:
            directory.rename(f"{directory}.step-{earlier}")
        write(directory, True)
        content = {"path": str(directory.absolute()), "step": step}
        replace_text(note, json.dumps(content))
    except OSError as error:
        raise UserError(
            f"{what} of step {step} was not written to {directory} ({error.strerror or error}): the "
            "checkpoints have it; make room, then write it with --resume."
        ) from None


def _written(note: Path, directory: str | Path) -> int | None:
    """Returns the step whose model this run exported to `directory`, as the file `note` has it;
    None: there is no export."""
    try:
        content: Any = parse_json(note.read_bytes())
        is_here = content["path"] == str(Path(directory).absolute())
        step = content["step"] if is_here else None
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return step if Path(directory).is_dir() else None
