"""Finds and reads the policy in a checkpoint of a run, without resuming the run.

Writes and moves nothing: the run may still be running. Knows the run's folder and a checkpoint's
metadata. Does not know how weights are used.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from functools import cached_property
from pathlib import Path
from typing import Any

import yaml

from pat_jax.common.errors import UserError
from pat_jax.models.config import ModelConfig
from pat_jax.models.lora import Lora
from pat_jax.models.policy import Policy
from pat_jax.run.checkpoints.files import CHECKPOINTS, checkpoints_in, damage
from pat_jax.run.checkpoints.meta import as_json, as_written, check_same, read_meta
from pat_jax.run.checkpoints.orbax_io import read_part
from pat_jax.run.files.hub_names import go_on_with_names
from pat_jax.run.roles.fingerprint import lora_of
from pat_jax.training.trainable_params import Leaves

_OF_A_MODEL = [field.name for field in fields(ModelConfig)]


@dataclass(frozen=True)
class SavedPolicy:
    """The policy in a complete checkpoint."""

    path: Path
    fingerprint: Mapping[str, Any]
    meta: Mapping[str, Any]
    damaged: Sequence[str]  # a sentence about each newer checkpoint, all of which are damaged

    @property
    def step(self) -> int:
        return int(self.path.name)

    @property
    def notes(self) -> list[str]:
        """Sentences for the user: which checkpoints are damaged, and which one this is."""
        return [*self.damaged, f"the policy after step {self.step} of {self.run}"]

    @property
    def run(self) -> Path:
        """The folder of its run."""
        return self.path.parent.parent

    @property
    def model(self) -> str:
        """The --model that the run began with."""
        return self._began["model"]

    @property
    def compute_dtype(self) -> str:
        return self._began["compute_dtype"]

    @cached_property
    def _began(self) -> Mapping[str, str]:
        try:
            options: Any = yaml.safe_load(self.meta["config"])
            found: dict[str, Any] = {name: options[name] for name in ("model", "compute_dtype")}
        except (yaml.YAMLError, RecursionError, ValueError, TypeError, LookupError):
            found = {"model": None}
        if not all(isinstance(value, str) for value in found.values()):
            raise UserError(
                f"the checkpoint {self.path} does not say the options that its run began with: expected a "
                "YAML mapping with model and compute_dtype in its metadata; choose another checkpoint."
            )
        return found

    def check(self, model: ModelConfig) -> None:
        """Raises UserError if the policy has another shape than `model`."""
        ours = as_json(asdict(model))
        saved, wanted = (
            {name: one[name] for name in _OF_A_MODEL if name in one}
            for one in (self.fingerprint, ours)
        )
        check_same(saved, wanted, self.path.parent)

    def lora(self, policy: Policy) -> Lora | None:
        """Returns the run's adapters of `policy`, or None if it trains the whole policy."""
        with as_written(self.path):
            return lora_of(self.fingerprint, policy)

    def read(self, abstract: Leaves) -> Leaves:
        """Reads the trained parameters, in the shapes and shardings of `abstract`. Raises UserError
        if the checkpoint cannot be read, such as when the run has deleted it meanwhile."""
        return read_part(self.path, {"train": {"params": abstract}})["train"]["params"]


def find_policy(run_dir: str, step: int | None) -> SavedPolicy:
    """Finds the newest undamaged checkpoint of a run, or that of `step`. Raises UserError if there
    is none."""
    folder = (Path(run_dir) / CHECKPOINTS).absolute()
    paths = checkpoints_in(folder)
    if not paths:
        raise UserError(
            f"option --run_dir is {run_dir!r}: expected the folder of a run of pat_jax.train or "
            f"pat_jax.sft that has saved a checkpoint in {CHECKPOINTS}/; check the path, or give a "
            "Hugging Face directory with --model."
        )
    go_on_with_names(folder.parent)
    there = ", ".join(path.name for path in paths)
    if step is not None and not (paths := [path for path in paths if path.name == str(step)]):
        raise UserError(
            f"option --checkpoint is {step}: expected a step that has a checkpoint in {folder}, which are "
            f"{there}; give one of these, or leave the option out to take the newest."
        )
    damaged: list[str] = []
    for path in reversed(paths):
        found = _whole(path)
        if not isinstance(found, str):
            return SavedPolicy(path, found["fingerprint"], found["meta"], damaged)
        damaged.append(f"the checkpoint of step {path.name} is damaged: {found}.")
    raise UserError(
        f"option --run_dir is {run_dir!r}: expected a whole checkpoint, but {' '.join(damaged)[:-1]}; "
        f"those there are {there}: choose another."
    )


def _whole(path: Path) -> Mapping[str, Any] | str:
    """Returns the checkpoint's fingerprint and metadata, or a text on what is wrong with it."""
    if reason := damage(path):
        return reason
    try:
        found = read_meta(path)
    except (OSError, ValueError) as error:
        return f"its metadata cannot be read ({error})"
    return found if "config" in found["meta"] else "it does not say which options it is of"
