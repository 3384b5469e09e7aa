"""The exit head of a run, and its files beside the checkpoints.

A file has the exit layer, and an array for each leaf of the training state. Knows options and
files. Does not know how a head learns.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import jax
import numpy as np

from pat_jax.engine.engine import RolloutEngine
from pat_jax.run.checkpoints.checkpoint import is_gone
from pat_jax.run.checkpoints.side_files import Arrays, SideFiles
from pat_jax.run.roles.saved_policy import SavedPolicy
from pat_jax.training.build import logit_tokens
from pat_jax.training.exit_head import ExitHeadTrainer
from pat_jax.training.trainer import Trainer

FOLDER = "exit_head"  # in the run's folder, with a file for each checkpoint
_KEPT = "heads of first layers"
_HEAD = ".params"  # the head's name among the leaves of a `TrainState`
_LAYER = "layer"  # the number of layers before the head


@dataclass
class LearnedHead:
    """An exit head that a run trains, saved beside each of its checkpoints."""

    trainer: ExitHeadTrainer
    files: SideFiles

    def save(self, step: int) -> None:
        """Writes the head's state, before the checkpoint of `step`. Skips it if a failed step has
        lost the state."""
        if is_gone(self.trainer.state):
            return
        layer = {_LAYER: np.array(self.trainer.depth)}
        self.files.write(step, layer | _named(self.trainer.state))

    def restore(self, step: int) -> str:
        """Restores the head of the checkpoint of `step`. Returns "", or a sentence on why the head
        begins anew."""
        depth = self.trainer.depth
        lost = f"the head of the policy's first {depth} layers; it begins to learn anew, and nothing else is lost"
        return self.files.restore(step, self._take, lost)

    def _take(self, arrays: Arrays) -> None:
        own = _named(self.trainer.state)
        found = _of_layer(arrays, self.trainer.depth)
        there, here = ({name: x.shape for name, x in each.items()} for each in (found, own))
        if there != here:
            raise ValueError("is the head of another model")
        self.trainer.take([found[name] for name in own])


def _of_layer(arrays: Arrays, depth: int) -> dict[str, np.ndarray]:
    """Returns the leaves of a head's training state. Raises ValueError if it is not the head after
    `depth` layers."""
    leaves = dict(arrays)
    if (layer := leaves.pop(_LAYER)) != depth:
        raise ValueError(f"is the head behind layer {layer}")
    return leaves


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

    def take(arrays: Arrays) -> None:
        head = _of_layer(arrays, depth)[_HEAD]
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
