"""Checkpoints of everything that a resumed run needs, written in the background by Orbax.

Knows pytrees, their shardings and JSON. Does not know what the state or the metadata mean.
"""

import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

import orbax.checkpoint as ocp

from pat_jax.errors import UserError

_ITEMS = ("state", "meta")


def check_fingerprint(directory: str | Path, fingerprint: Mapping[str, Any]) -> None:
    """Refuses a newest checkpoint with another fingerprint. Reads a small file and writes nothing."""
    directory = Path(directory).absolute()
    if not directory.is_dir():
        return
    _silence_orbax()
    options = ocp.CheckpointManagerOptions(
        read_only=True, create=False, save_interval_steps=0, cleanup_tmp_directories=False
    )
    with ocp.CheckpointManager(directory, item_names=_ITEMS, options=options) as manager:
        if (step := manager.latest_step()) is not None:
            _read_meta(manager, step, directory, _as_json(fingerprint))


class Checkpointer:
    """The checkpoints of one run: `directory/STEP`, each complete or not there at all.

    Args:
      directory: where they lie; made when missing.
      max_to_keep: older ones are deleted after a newer one is complete.
      fingerprint: what must agree for a checkpoint to be usable (the model's configuration, as JSON
        values). Saved with each checkpoint and compared before any array is read.
    """

    def __init__(
        self,
        directory: str | Path,
        max_to_keep: int = 2,
        *,
        fingerprint: Mapping[str, Any] | None = None,
    ):
        _silence_orbax()
        self._directory = Path(directory).absolute()
        self._fingerprint = _as_json(fingerprint or {})
        self._manager = ocp.CheckpointManager(
            self._directory,
            item_names=_ITEMS,
            options=ocp.CheckpointManagerOptions(
                preservation_policy=ocp.checkpoint_managers.LatestN(max_to_keep),
                cleanup_tmp_directories=True,
            ),
        )

    def save(self, step: int, state: Any, meta: Mapping[str, Any]) -> None:
        """Start writing; the state may be donated as soon as this returns.

        Args:
          step: steps done; saving the newest step again does nothing.
          state: a pytree of arrays.
          meta: JSON values; floats survive exactly, tuples come back as lists.

        Raises:
          ValueError: there is a newer checkpoint, so that this one could never be resumed from.
        """
        latest = self.latest_step()
        if latest is not None and step < latest:
            raise ValueError(f"cannot save step {step}: {self._directory} already holds {latest}.")
        if step == latest:
            return
        self._manager.save(
            step,
            args=ocp.args.Composite(
                state=ocp.args.StandardSave(state),
                meta=ocp.args.JsonSave({"fingerprint": self._fingerprint, "meta": dict(meta)}),
            ),
        )

    def latest_step(self) -> int | None:
        """The newest complete checkpoint, or the one being written; None when there is none."""
        return self._manager.latest_step()

    def restore(self, abstract_state: Any) -> tuple[int, Any, dict[str, Any]]:
        """The newest complete checkpoint.

        Args:
          abstract_state: the structure wanted: a pytree of `jax.ShapeDtypeStruct` with shardings,
            which need not be those it was saved with.

        Returns:
          Its step, state and metadata.

        Raises:
          UserError: there is none, or it belongs to another model.
        """
        self.wait()
        step = self.latest_step()
        if step is None:
            raise UserError(f"there is no checkpoint to resume from in {self._directory}.")
        meta = _read_meta(self._manager, step, self._directory, self._fingerprint)
        restored = self._manager.restore(
            step, args=ocp.args.Composite(state=ocp.args.StandardRestore(abstract_state))
        )
        return step, restored["state"], meta

    def wait(self) -> None:
        """Return when nothing is being written; an error of the writing thread is raised here."""
        self._manager.wait_until_finished()

    def close(self) -> None:
        self._manager.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def _as_json(fingerprint: Mapping[str, Any]) -> dict[str, Any]:
    return json.loads(json.dumps(dict(fingerprint)))


def _read_meta(
    manager: ocp.CheckpointManager, step: int, directory: Path, wanted: Mapping[str, Any]
) -> dict[str, Any]:
    """The metadata of a checkpoint, once its fingerprint is seen to be `wanted`."""
    read = manager.restore(step, args=ocp.args.Composite(meta=ocp.args.JsonRestore()))["meta"]
    saved, missing = read["fingerprint"], "nothing"
    differences = [
        f"{name} ({saved.get(name, missing)} there, {wanted.get(name, missing)} here)"
        for name in dict.fromkeys([*wanted, *saved])
        if saved.get(name, missing) != wanted.get(name, missing)
    ]
    if differences:
        raise UserError(
            f"the checkpoint in {directory} is of another model, which differs in"
            f" {', '.join(differences)}: give the --model and options it was saved with, or another"
            " --run_dir."
        )
    return read["meta"]


def _silence_orbax() -> None:
    """Orbax reports every step of its work, a hundred lines a checkpoint where INFO is shown."""
    logging.getLogger("absl").setLevel(logging.ERROR)
