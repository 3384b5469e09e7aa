"""The exit head of a run, and its files beside the checkpoints.

A file has a line with the checksum of the rest, a line of JSON with the exit layer, and the
training state as an .npz archive with a member for each leaf. Knows options and files. Does not
know how a head learns.
"""

import io
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from pat_jax.engine.engine import RolloutEngine
from pat_jax.run.checkpoints.checkpoint import is_gone
from pat_jax.run.checkpoints.side_files import SideFiles, as_file, of_file
from pat_jax.run.roles.saved_policy import SavedPolicy
from pat_jax.training.build import logit_tokens
from pat_jax.training.exit_head import ExitHeadTrainer
from pat_jax.training.trainer import Trainer

FOLDER = "exit_head"  # in the run's folder, with a file for each checkpoint
_WHAT = "exit head"
_KEPT = "heads of first layers"
_HEAD = ".params"  # the head's name among the leaves of a `TrainState`


class LearnedHead:
    """An exit head that a run trains, saved beside each of its checkpoints."""

    def __init__(self, trainer: ExitHeadTrainer, files: SideFiles):
        self.trainer = trainer
        self._files = files

    def save(self, step: int) -> None:
        """Writes the head's state, before the checkpoint of `step`. Skips it if a failed step has
        lost the state."""
        if is_gone(self.trainer.state):
            return
        self._files.write(step, as_bytes(self.trainer.depth, _named(self.trainer.state)))

    def restore(self, step: int) -> str:
        """Restores the head of the checkpoint of `step`. Returns "", or a sentence on why the head
        begins anew."""
        depth = self.trainer.depth
        lost = f"the head of the policy's first {depth} layers; it begins to learn anew, and nothing else is lost"
        return self._files.restore(step, self._take, lost)

    def _take(self, content: bytes) -> None:
        own = _named(self.trainer.state)
        found = of_bytes(content, self.trainer.depth)
        there, here = ({name: x.shape for name, x in each.items()} for each in (found, own))
        if there != here:
            raise ValueError("is the head of another model")
        self.trainer.take([found[name] for name in own])


def as_bytes(depth: int, leaves: Mapping[str, np.ndarray]) -> bytes:
    """Returns the content of a file. `depth` is the number of layers before the head; `leaves` is
    its training state, by name."""
    arrays = io.BytesIO()
    named = dict[str, Any](leaves)
    # Without allow_pickle: NumPy before 2.2 would write it as one more array.
    np.savez(arrays, **named)
    return as_file(_WHAT, {"layer": depth}, arrays.getvalue())


def of_bytes(content: bytes, depth: int) -> dict[str, np.ndarray]:
    """Returns the leaves that `as_bytes` was given, for the head after `depth` layers. Raises
    ValueError if the content is damaged, or belongs to another layer."""
    told, arrays = of_file(_WHAT, content)
    layer = told.get("layer") if isinstance(told, dict) else None
    if layer != depth:
        raise ValueError(f"is the head behind layer {layer}")
    try:
        with np.load(io.BytesIO(arrays), allow_pickle=False) as found:
            return dict(found)
    except (zipfile.BadZipFile, EOFError, OSError) as error:
        raise ValueError(f"holds no arrays ({error})") from None


def _named(state: object) -> dict[str, np.ndarray]:
    leaves = jax.tree.leaves_with_path(state)
    return {jax.tree_util.keystr(path): np.asarray(x) for path, x in leaves}


def saved_head(saved: SavedPolicy, engine: RolloutEngine) -> tuple[np.ndarray | None, str]:
    """Returns the exit head of a run's checkpoint, a float32 matrix [embed, embed], and "". If the
    head cannot be used: None, and a sentence on why. Without early-exit drafts: None and ""."""
    depth = engine.specs.drafts.exit_layer
    embed = engine.policy.config.embed_dim
    if not depth:
        return None, ""
    heads: list[np.ndarray] = []

    def take(content: bytes) -> None:
        head = of_bytes(content, depth)[_HEAD]
        if head.shape != (embed, embed):
            raise ValueError("is the head of another model")
        heads.append(head)

    lost = f"the head of the policy's first {depth} layers; they draft with one of zeros, and the tokens stay the same"
    why = SideFiles(saved.run, FOLDER, _KEPT).restore(saved.step, take, lost)
    return next(iter(heads), None), why


def learned_head(
    run_dir: str,
    trainer: Trainer,
    depth: int,
    micro_shapes: Sequence[tuple[int, int]],
    temperature: float,
) -> LearnedHead:
    """Builds and compiles the exit head of a run, after the first `depth` layers of the policy."""
    built = ExitHeadTrainer(
        trainer,
        depth=depth,
        micro_shapes=micro_shapes,
        dtype=trainer.trained.compute_dtype,
        temperature=temperature,
        logit_tokens=logit_tokens(trainer.policy, trainer.layout),
    )
    built.compile()
    return LearnedHead(built, SideFiles(Path(run_dir), FOLDER, _KEPT))
