"""Exports a run's models as Hugging Face directories, or the policy's adapters as a PEFT directory.

Knows the run's folder and the export's. Does not know the formats
(`models/checkpoints/hf_export.py`, `models/checkpoints/peft_adapter.py`).
"""

import json
from collections.abc import Callable, Collection
from functools import partial
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
from pat_jax.config.any_run import AnyRun
from pat_jax.config.run import RunConfig
from pat_jax.models.checkpoints.hf_export import attend, check_export, export
from pat_jax.models.checkpoints.peft_adapter import export_adapter
from pat_jax.models.policy import Params, Policy
from pat_jax.rl.data import arithmetic
from pat_jax.run.roles.critic import with_head_bias
from pat_jax.training.build import DTYPES
from pat_jax.training.rest import fetched
from pat_jax.training.roles import Roles, States
from pat_jax.training.trainable_params import Leaves, TrainableParams
from pat_jax.training.trainer import CRITIC, POLICY

# In the run's folder: path and step of its export.
_NOTE, _CRITIC_NOTE = "exported.json", "exported-critic.json"


def check_export_dir(config: AnyRun) -> None:
    """Raises UserError if the policy cannot be written to --checkpoint.export_dir."""
    check_folder(config, "checkpoint.export_dir", config.checkpoint.export_dir, _NOTE)


def check_critic_export_dir(config: RunConfig) -> None:
    """Raises UserError if the critic cannot be written to --critic.export_dir."""
    directory = config.critic.export_dir
    check_folder(config, "critic.export_dir", directory, _CRITIC_NOTE)
    other = config.checkpoint.export_dir
    is_same = bool(directory and other) and Path(directory).absolute() == Path(other).absolute()
    expected = "another folder than --checkpoint.export_dir, which is the policy's"
    require(not is_same, "critic.export_dir", directory, expected)


def check_folder(config: AnyRun, option: str, name: str, note: str) -> None:
    """Raises UserError if nothing can be exported to the folder `name`; empty asks for no export.

    Args:
      note: the file in the run's folder that says what is in it.
    """
    if not name:
        return
    if Path(config.run_dir).absolute().is_relative_to(Path(name).absolute()):
        raise UserError(
            f"option --{option} is {name!r}: expected a folder of its own, but the run "
            f"folder {config.run_dir!r} lies there; choose another, such as one in the run folder."
        )
    if not (config.resume and _written(Path(config.run_dir) / note, name) is not None):
        check_export(name)


def export_roles(config: RunConfig, roles: Roles, states: States, step: int) -> None:
    """Writes the models of `step` that the options ask for. Raises UserError if that fails."""
    tokenizer_dir = arithmetic.TOKENIZER_DIR if config.data.is_arithmetic else None
    if config.checkpoint.export_dir:
        export_policy(config, roles.policy.trained, states[POLICY].params, step, tokenizer_dir)
    if config.critic.export_dir and roles.critic:
        with fetched(states[CRITIC].params, roles.critic.shardings) as params:
            _export_critic(config, roles.critic.trained, params, step, tokenizer_dir)


def _export_critic(
    config: RunConfig,
    trained: TrainableParams,
    params: Leaves,
    step: int,
    tokenizer_dir: Path | None,
) -> None:
    policy, whole = with_head_bias(trained.policy, trained.whole(trained.frozen, params))
    directory, note = Path(config.critic.export_dir), Path(config.run_dir) / _CRITIC_NOTE
    write = partial(_write_merged, config, policy, whole, tokenizer_dir, None)
    _export("the critic", directory, note, step, write, trained.layout.devices)


def export_policy(
    config: AnyRun,
    trained: TrainableParams,
    params: Leaves,
    step: int,
    tokenizer_dir: str | Path | None = None,
    padding: tuple[int, str] | None = None,
) -> None:
    """Writes the policy of `step`, whose trained parameters are `params`. An earlier export of this
    run is renamed and stays beside it.

    Args:
      tokenizer_dir: the directory of the tokenizer; None: the model's directory, if it has one.
      padding: see `export`; an adapter's directory does not say it.

    Raises:
      UserError: the policy cannot be written, such as on a full disk.
    """
    note, directory = Path(config.run_dir) / _NOTE, Path(config.checkpoint.export_dir)
    if config.lora.export == "adapter":
        write = partial(_write_adapter, config, trained, params)
    else:
        whole = trained.whole(trained.frozen, params)
        write = partial(_write_merged, config, trained.policy, whole, tokenizer_dir, padding)
    _export("the policy", directory, note, step, write, trained.layout.devices)


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
      devices: of the model. All processes that own some call `write`; the first one prepares the
        folder, and writes.
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


def _write_merged(
    config: AnyRun,
    policy: Policy,
    params: Params,
    tokenizer_dir: str | Path | None,
    padding: tuple[int, str] | None,
    directory: Path,
    is_writer: bool,
) -> None:
    dtype = DTYPES[config.compute_dtype]
    if not is_writer:
        attend(policy, params, dtype)
        return
    if tokenizer_dir is None and is_checkpoint(config.model):
        tokenizer_dir = local_checkpoint(config.model, weights=False)
    export(directory, policy, params, dtype, tokenizer_dir=tokenizer_dir, padding=padding)


def _write_adapter(
    config: AnyRun, trained: TrainableParams, params: Leaves, directory: Path, is_writer: bool
) -> None:
    host = jax.tree.map(on_host, params)  # by all processes
    if is_writer:
        assert trained.lora  # the options were checked
        export_adapter(directory, trained.lora, host, base=config.model)


def _written(note: Path, directory: str | Path) -> int | None:
    """Returns the step whose model this run exported to `directory`, by the note on it; None: it is
    not there."""
    try:
        content: Any = parse_json(note.read_bytes())
        is_here = content["path"] == str(Path(directory).absolute())
        step = content["step"] if is_here else None
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return step if Path(directory).is_dir() else None
