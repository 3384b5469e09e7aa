"""Writes TensorBoard event files, and survives a full disk."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path

from tensorboardX import SummaryWriter
from tensorboardX.record_writer import register_writer_factory

from pat_jax.common.files import PatientFile
from pat_jax.run.logging.samples import Sample

_PATIENT = "patient"  # prefix of paths that TensorBoard's writer opens as patient files


class _PatientRecords:
    """A record file that survives a full disk. Otherwise the writer's thread would end, and then
    the run, once the writer's queue is full."""

    def open(self, path: str) -> PatientFile:
        return PatientFile(path.removeprefix(f"{_PATIENT}:"))

    def directory_check(self, path: str) -> None:
        Path(path.removeprefix(f"{_PATIENT}:")).mkdir(parents=True, exist_ok=True)


register_writer_factory(_PATIENT, _PatientRecords())


class TensorBoard:
    """Writes the event files of a folder. Events of an earlier start from `resume_step` on are
    hidden."""

    def __init__(self, folder: Path, resume_step: int | None):
        self._writer = SummaryWriter(f"{_PATIENT}:{folder}", purge_step=resume_step)

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        for name, value in metrics.items():
            if not math.isfinite(value):  # a gap in the curve; the writer would print a warning
                continue
            self._writer.add_scalar(name, value, step)

    def samples(self, step: int, samples: Sequence[Sample]) -> None:
        self._writer.add_text("samples", "\n\n---\n\n".join(map(_markdown, samples)), step)

    def flush(self) -> None:
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


def _markdown(sample: Sample) -> str:
    """Returns a sample as Markdown, with its texts indented so that their markup shows as is."""
    prompt, response = (
        "\n".join(f"    {line}" for line in text.splitlines())
        for text in (sample.prompt, sample.completion)
    )
    return f"**prompt**\n\n{prompt}\n\n**response**: {sample.facts}\n\n{response}"
