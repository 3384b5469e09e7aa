"""The head of a policy's first layers in a run, and what of it a resumed run goes on with.

A file is one line with a checksum of all behind it, one of JSON with the layer, and the state of
learning as NumPy writes it, by the names of its leaves. Knows options and files. Does not know how
a head learns.
"""

import io
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from pat_jax.config.run import RunConfig
from pat_jax.engine.engine import RolloutEngine
from pat_jax.run.checkpoints.checkpoint import is_gone
from pat_jax.run.checkpoints.side_files import SideFiles, as_file, of_file
from pat_jax.run.results.saved_policy import SavedPolicy
from pat_jax.run.setup import Setup
from pat_jax.training.build import DTYPES, logit_tokens
from pat_jax.training.exit_head import ExitHeadTrainer

FOLDER = "exit_head"  # in that of the run, with a file for each checkpoint
_WHAT, _KEPT = "exit head", "heads of first layers"
_HEAD = ".params"  # of the leaves of a `TrainState`


class LearnedHead:
    """What has been learned of one, beside the run's checkpoints."""

    def __init__(self, trainer: ExitHeadTrainer, files: SideFiles):
        self.trainer, self._files = trainer, files

    def save(self, step: int) -> None:
        """Writes it before the checkpoint of `step`, unless a failed step of its own has lost
        it."""
        if is_gone(self.trainer.state):
            return
        self._files.write(step, as_bytes(self.trainer.depth, _named(self.trainer.state)))

    def restore(self, step: int) -> str:
        """Goes on with that of the checkpoint of `step`. Returns why it begins anew, in a
        sentence."""
        depth = self.trainer.depth
        lost = f"the head of the policy's first {depth} layers; it begins to learn anew, and nothing else is lost"
        return self._files.restore(step, self._take, lost)

    def _take(self, content: bytes) -> None:
        own, found = _named(self.trainer.state), of_bytes(content, self.trainer.depth)
        there, here = ({name: x.shape for name, x in each.items()} for each in (found, own))
        if there != here:
            raise ValueError("is the head of another model")
        self.trainer.take([found[name] for name in own])


def as_bytes(depth: int, leaves: Mapping[str, np.ndarray]) -> bytes:
    """A file's content: how many layers are before the head, and the state of learning by name."""
    arrays, named = io.BytesIO(), dict[str, Any](leaves)
    # NumPy before 2.2 would write an option of this as one more array.
    np.savez(arrays, **named)
    return as_file(_WHAT, {"layer": depth}, arrays.getvalue())


def of_bytes(content: bytes, depth: int) -> dict[str, np.ndarray]:
    """The leaves that `as_bytes` was given, for the head behind `depth` layers. Raises ValueError
    where the content is damaged, or of another layer."""
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
    """What the engine's first layers draft with, where its weights are those of a run's checkpoint:
    float32[embed, embed], as the run had learned it, and an empty sentence. None, and a sentence
    about it, where nothing is known; None alone where they do not draft."""
    depth, embed = engine.specs.drafts.exit_layer, engine.policy.config.embed_dim
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
    config: RunConfig, setup: Setup, micro_shapes: Sequence[tuple[int, int]]
) -> LearnedHead | None:
    """Compiled; None where the first layers do not draft, or nothing is learned."""
    depth, trainer = setup.engine.specs.drafts.exit_layer, setup.trainer
    if not depth or not config.train:
        return None
    built = ExitHeadTrainer(
        trainer,
        depth=depth,
        micro_shapes=micro_shapes,
        dtype=DTYPES[config.compute_dtype],
        temperature=config.rollout.temperature,
        logit_tokens=logit_tokens(setup.policy, trainer.layout),
    )
    built.compile()
    return LearnedHead(built, SideFiles(Path(config.run_dir), FOLDER, _KEPT))
