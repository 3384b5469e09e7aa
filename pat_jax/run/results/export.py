"""Exports a run's policy as a Hugging Face directory, or its adapters as a PEFT directory.

Knows the run's folder and the export's. Does not know the formats
(`models/checkpoints/hf_export.py`, `models/checkpoints/peft_adapter.py`).
"""

import json
from pathlib import Path
from typing import Any

import jax

from pat_jax.common.errors import UserError
from pat_jax.common.files import replace_text
from pat_jax.common.hosts.together import process_group
from pat_jax.common.hub import is_checkpoint, local_checkpoint
from pat_jax.common.json_text import parse_json
from pat_jax.common.pytree import on_host
from pat_jax.config.any_run import AnyRun
from pat_jax.models.checkpoints.hf_export import attend, check_export, export
from pat_jax.models.checkpoints.peft_adapter import export_adapter
from pat_jax.training.build import DTYPES
from pat_jax.training.trainable_params import Leaves, TrainableParams

_NOTE = "exported.json"  # in the run's folder: path and step of its export


def check_export_dir(config: AnyRun) -> None:
    """Raises UserError if the policy cannot be written to --checkpoint.export_dir."""
    if not (name := config.checkpoint.export_dir):
        return
    if Path(config.run_dir).absolute().is_relative_to(Path(name).absolute()):
        raise UserError(
            f"option --checkpoint.export_dir is {name!r}: expected a folder of its own, but the run "
            f"folder {config.run_dir!r} lies there; choose another, such as one in the run folder."
        )
    if not (config.resume and _written(Path(config.run_dir), name) is not None):
        check_export(name)


def export_policy(
    config: AnyRun,
    trained: TrainableParams,
    params: Leaves,
    step: int,
    tokenizer_dir: str | Path | None = None,
) -> None:
    """Writes the policy of `step`, whose trained parameters are `params`. An earlier export of this
    run is renamed and stays beside it.

    Args:
      tokenizer_dir: the directory of the tokenizer; None: the model's directory, if it has one.

    Raises:
      UserError: the policy cannot be written, such as on a full disk.
    """
    folder, directory = Path(config.run_dir), Path(config.checkpoint.export_dir)
    form = config.lora.export
    earlier = process_group().agree("export before", lambda: _written(folder, directory))
    if earlier == step:
        return
    if tokenizer_dir is None and is_checkpoint(config.model):
        tokenizer_dir = local_checkpoint(config.model, weights=False)
    dtype = DTYPES[config.compute_dtype]
    if form == "adapter":
        params = jax.tree.map(on_host, params)
    else:
        params = trained.whole(trained.frozen, params)
    if not process_group().is_first:
        if form == "merged":
            attend(trained.policy, params, dtype)
        return
    try:
        if earlier is not None:
            directory.rename(f"{directory}.step-{earlier}")
        if form == "adapter":
            assert trained.lora  # the options were checked
            export_adapter(directory, trained.lora, params, base=config.model)
        else:
            export(directory, trained.policy, params, dtype, tokenizer_dir=tokenizer_dir)
        content = {"path": str(directory.absolute()), "step": step}
        replace_text(folder / _NOTE, json.dumps(content))
    except OSError as error:
        raise UserError(
            f"the policy of step {step} was not written to {directory} ({error.strerror or error}): the "
            "checkpoints have it; make room, then write it with --resume."
        ) from None


def _written(folder: Path, directory: str | Path) -> int | None:
    """Returns the step whose policy this run exported to `directory`; None: it is not there."""
    try:
        note: Any = parse_json((folder / _NOTE).read_bytes())
        step = note["step"] if note["path"] == str(Path(directory).absolute()) else None
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return step if Path(directory).is_dir() else None
