"""Trackio: a database on this machine, or what its environment variables name."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pat_jax.run.logging.samples import Sample, table


class Trackio:
    """
    Args:
      folder: of the run, whose name is the run's.
      options: of the run, as JSON values.
      is_resumed: whether it goes on in the newest run of that name.
    """

    def __init__(self, folder: Path, project: str, options: Mapping[str, Any], *, is_resumed: bool):
        import trackio  # pyright: ignore[reportMissingImports]  # an extra

        self._table = trackio.Table
        self._run = trackio.init(
            project=project,
            name=folder.name,
            config=dict(options),
            resume="allow" if is_resumed else "never",
        )

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        self._run.log(dict(metrics), step=step)

    def samples(self, step: int, samples: Sequence[Sample]) -> None:
        columns, rows = table(step, samples)
        self._run.log({"samples": self._table(columns=columns, data=rows)}, step=step)

    def close(self) -> None:
        self._run.finish()
