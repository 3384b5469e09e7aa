"""Writes the metrics of a run to metrics.jsonl, a flushed line per write, and to trackers.

Knows names and numbers. Does not know what they mean (`progress.py` shows some of them,
docs/metrics.md explains all).

Names are `namespace/name`: `reward/*`, `rollout/*`, `train/*`, `eval/*`, `progress/*`, `memory/*`,
`timing/*` (seconds).
"""

import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

from pat_jax.common.files import open_lines
from pat_jax.common.json_text import JsonError, parse_json
from pat_jax.run.files.folder import METRICS_FILE
from pat_jax.run.logging.samples import Sample, SamplesFile
from pat_jax.run.logging.trackers.tracker import Guarded, TensorBoard, Tracker

log = logging.getLogger(__name__)


class MetricsWriter:
    """Appends to the metrics of `run_dir`; lines that were written are never removed.

    Args:
      run_dir: the run's folder; created when missing.
      resume_step: the first step that a resumed run repeats, the one after its checkpoint. A
        `resume` line is appended, and readers drop what the interrupted run had written from this
        step on.
      trackers: trackers in addition to TensorBoard, by name; `close` closes them.
      notify: called once for each tracker that fails.
    """

    def __init__(
        self,
        run_dir: str | Path,
        *,
        resume_step: int | None = None,
        trackers: Mapping[str, Tracker] | None = None,
        notify: Callable[[str], None] = log.warning,
    ):
        folder = Path(run_dir)
        folder.mkdir(parents=True, exist_ok=True)
        self._file = open_lines(folder / METRICS_FILE)
        self._tensorboard = TensorBoard(folder / "tensorboard", resume_step)
        every = {"tensorboard": self._tensorboard, **(trackers or {})}
        self._trackers = [Guarded(name, tracker, notify) for name, tracker in every.items()]
        self._samples = SamplesFile(folder, resume_step)
        if resume_step is not None:
            row = {"event": "resume", "time": time.time(), "step": resume_step}
            self._file.write_row(row)

    def write(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Writes numbers, scalar arrays or texts of `step`. Trackers get no texts."""
        row = {name: _plain(name, value) for name, value in metrics.items()}
        self._file.write_row({"step": step, "time": time.time()} | row, allow_nan=False)
        numbers = {
            name: math.nan if value is None else value
            for name, value in row.items()
            if not isinstance(value, str)
        }
        for tracker in self._trackers:
            tracker.write(step, numbers)

    def samples(self, step: int, samples: Sequence[Sample]) -> None:
        """Keeps a few responses of `step` for the run's page, and shows them in the trackers."""
        try:
            self._samples.add(step, samples)
        except OSError as error:  # such as a full disk; the next write includes these samples
            log.warning("samples of step %d: %s", step, error)
        for tracker in self._trackers:
            tracker.samples(step, samples)

    def flush(self) -> None:
        """Writes TensorBoard's events to disk; lines are there already."""
        self._tensorboard.flush()

    def close(self) -> None:
        self._file.close()
        for tracker in self._trackers:
            tracker.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def read_metrics(path: str | Path) -> list[dict[str, Any]]:
    """Returns the rows of a metrics file, one for each step, in order.

    A later value of the same step and name replaces an earlier one. A resumed run replaces all
    steps from where it resumed. Damaged lines are left out. Values that were not finite are NaN.
    """
    rows: dict[int, dict[str, Any]] = {}
    for line in Path(path).read_bytes().split(b"\n"):
        try:
            row = parse_json(line)
        except JsonError:
            continue
        if not isinstance(row, dict) or type(row.get("step")) is not int:
            continue
        if row.get("event") == "resume":
            rows = {step: kept for step, kept in rows.items() if step < row["step"]}
        elif "event" not in row and all(map(_is_written, row.values())):
            read = {name: math.nan if value is None else value for name, value in row.items()}
            rows[row["step"]] = rows.get(row["step"], {}) | read
    return [rows[step] for step in sorted(rows)]


def _is_written(value: object) -> bool:
    """Returns whether the value is of a kind that `_plain` returns."""
    is_number = isinstance(value, float) or (isinstance(value, int) and abs(value) < 2**63)
    return value is None or is_number or isinstance(value, str)


def _plain(name: str, value: Any) -> float | int | str | None:
    """Returns a metric as a JSON value. A number that is not finite becomes None, as JSON has no
    NaN."""
    if "/" not in name:
        raise ValueError(f"metric {name!r} has no namespace: write namespace/name.")
    if isinstance(value, str):
        return value
    number = value.item() if hasattr(value, "item") else value
    if not isinstance(number, bool | int | float):
        raise TypeError(
            f"metric {name!r} is a {type(value).__name__}: expected one number or text."
        )
    return number if math.isfinite(number) else None
