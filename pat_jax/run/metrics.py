"""What a run measured: metrics.jsonl, one flushed line per write, and TensorBoard event files.

Knows names and numbers. Does not know what they mean (`progress.py` shows some of them).

Names are `namespace/name`: `reward/*`, `rollout/*`, `train/*`, `eval/*`, `timing/*` (seconds).
"""

import json
import math
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

from tensorboardX import SummaryWriter
from tensorboardX.record_writer import register_writer_factory

from pat_jax.common.files import PatientFile, open_lines

METRICS_FILE = "metrics.jsonl"

_PATIENT = "patient"  # the prefix of paths that TensorBoard's writer is to open as patient files


class _PatientRecords:
    """Without it a full disk ends the writer's thread, and the run with it where its queue is full."""

    def open(self, path: str) -> PatientFile:
        return PatientFile(path.removeprefix(f"{_PATIENT}:"))

    def directory_check(self, path: str) -> None:
        Path(path.removeprefix(f"{_PATIENT}:")).mkdir(parents=True, exist_ok=True)


register_writer_factory(_PATIENT, _PatientRecords())


class MetricsWriter:
    """Appends to the metrics of `run_dir`; nothing that was written is ever cut off.

    Args:
      run_dir: the folder of the run; made when missing.
      resume_step: the first step that a resumed run repeats, the one after its checkpoint. A
        `resume` line is appended, and readers drop what the interrupted run had written from this
        step on.
    """

    def __init__(self, run_dir: str | Path, *, resume_step: int | None = None):
        folder = Path(run_dir)
        folder.mkdir(parents=True, exist_ok=True)
        self._file = open_lines(folder / METRICS_FILE)
        events = f"{_PATIENT}:{folder / 'tensorboard'}"
        self._tensorboard = SummaryWriter(events, purge_step=resume_step)
        if resume_step is not None:
            self.event("resume", step=resume_step)

    def write(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Write the metrics of `step`: numbers, scalar arrays, or text (which TensorBoard skips)."""
        row = {name: _plain(name, value) for name, value in metrics.items()}
        self._append({"step": step, "time": time.time()} | row)
        for name, value in row.items():
            if not isinstance(value, str):
                self._tensorboard.add_scalar(name, math.nan if value is None else value, step)

    def flush(self) -> None:
        """TensorBoard's events too are on disk when this returns; lines always are."""
        self._tensorboard.flush()

    def event(self, name: str, **fields: Any) -> None:
        """Write something that happened and is not a metric, as one line of its own."""
        self._append({"event": name, "time": time.time()} | fields)

    def close(self) -> None:
        self._file.close()
        self._tensorboard.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _append(self, row: Mapping[str, Any]) -> None:
        self._file.write(f"{json.dumps(row, allow_nan=False)}\n".encode())
        self._file.flush()


def read_metrics(path: str | Path) -> list[dict[str, Any]]:
    """The rows of a metrics file in the order of their steps, one for each step.

    A later value of the same step and name supersedes an earlier one, a resumed run supersedes all
    steps from where it resumed, and a line that was cut off or damaged is left out. What was not
    finite comes back as NaN.
    """
    rows: dict[int, dict[str, Any]] = {}
    for line in Path(path).read_bytes().split(b"\n"):
        try:
            row = json.loads(line)  # not UTF-8: a ValueError as well
        except ValueError:
            continue
        if not isinstance(row, dict) or not isinstance(row.get("step", 0), int):
            continue
        if row.get("event") == "resume":
            rows = {step: kept for step, kept in rows.items() if step < row["step"]}
        elif "event" not in row and "step" in row:
            read = {name: math.nan if value is None else value for name, value in row.items()}
            rows[row["step"]] = rows.get(row["step"], {}) | read
    return [rows[step] for step in sorted(rows)]


def _plain(name: str, value: Any) -> float | int | str | None:
    """A JSON value; null stands for what is not finite, which JSON cannot say."""
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
