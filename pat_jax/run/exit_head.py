"""The head of a policy's first layers in a run, and what of it a resumed run goes on with.

Knows options and files. Does not know how a head learns.
"""

import io
import zipfile
from collections.abc import Sequence
from pathlib import Path

import jax
import numpy as np

from pat_jax.config.run import RunConfig
from pat_jax.run.setup import Setup
from pat_jax.run.side_files import SideFiles
from pat_jax.training.build import DTYPES, logit_tokens
from pat_jax.training.exit_head import ExitHeadTrainer

FOLDER = "exit_head"  # in that of the run, with a file for each checkpoint


class LearnedHead:
    """What has been learned of one, beside the run's checkpoints: its state as NumPy has it, leaf by leaf."""

    def __init__(self, trainer: ExitHeadTrainer, files: SideFiles):
        self.trainer, self._files = trainer, files

    def save(self, step: int) -> None:
        """Writes it before the checkpoint of `step` is."""
        leaves = map(np.asarray, jax.tree.leaves(self.trainer.state))
        content = io.BytesIO()
        np.savez(content, *leaves)
        self._files.write(step, content.getvalue())

    def restore(self, step: int) -> str:
        """Goes on with what was written with the checkpoint of `step`.

        Returns:
          A sentence about why it begins anew; empty where it does not.
        """
        content, why = self._files.read(step)
        if content is not None:
            why = self._take(content)
        if not why:
            return ""
        return (
            f"{self._files.path(step)} {why}: expected the head of the policy's first layers; it begins to learn "
            "anew, and nothing else is lost."
        )

    def _take(self, content: bytes) -> str:
        try:
            with np.load(io.BytesIO(content), allow_pickle=False) as found:
                leaves = [found[name] for name in found.files]
        except (ValueError, OSError, EOFError, zipfile.BadZipFile, KeyError):
            return "is damaged (NumPy cannot read it)"
        shapes = [x.shape for x in jax.tree.leaves(self.trainer.state)]
        if [x.shape for x in leaves] != shapes:
            return "is the head of another model"
        self.trainer.take(leaves)
        return ""


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
    return LearnedHead(built, SideFiles(Path(config.run_dir), FOLDER, "heads of first layers"))
