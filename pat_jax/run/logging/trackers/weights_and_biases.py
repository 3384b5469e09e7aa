"""Weights & Biases: online, or by WANDB_MODE=offline into the run's folder."""

import math
import secrets
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pat_jax.common.files import replace_text
from pat_jax.run.logging.samples import Sample, table

ID_FILE = "wandb_run_id"  # in the run's folder: a resumed run goes on in the same chart
_STEP = "step"  # the axis of all charts: W&B's own counter would drop the steps that a resumption repeats


class WeightsAndBiases:
    """
    Args:
      folder: of the run, whose name is the run's.
      options: of the run, as JSON values.
      is_resumed: whether the run goes on; its id is in the folder.
    """

    def __init__(self, folder: Path, project: str, options: Mapping[str, Any], *, is_resumed: bool):
        import wandb  # pyright: ignore[reportMissingImports]  # an extra

        self._table = wandb.Table
        ids = folder / ID_FILE
        run_id = ids.read_text(encoding="utf-8") if is_resumed and ids.exists() else None
        run_id = run_id or secrets.token_hex(4)
        self._run = wandb.init(
            project=project,
            name=folder.name,
            id=run_id,
            resume="allow",
            dir=str(folder),
            settings=wandb.Settings(console="off"),  # the terminal is the progress bar's
        )
        replace_text(ids, run_id)
        self._run.config.update(dict(options), allow_val_change=True)
        self._run.define_metric(_STEP)
        self._run.define_metric("*", step_metric=_STEP)

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        self._run.log({_STEP: step, **metrics})

    def samples(self, step: int, samples: Sequence[Sample]) -> None:
        columns, rows = table(step, samples)
        # None would make a column of numbers one of anything.
        data = [[math.nan if cell is None else cell for cell in row] for row in rows]
        self._run.log({_STEP: step, "samples": self._table(columns=columns, data=data)})

    def close(self) -> None:
        self._run.finish()
