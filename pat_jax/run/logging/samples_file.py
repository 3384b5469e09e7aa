"""The samples of a run in its folder: of the latest steps, long texts cut."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from pat_jax.common.files import replace_text
from pat_jax.run.checkpoints.json_state import declared, gone_on_with, read_kept
from pat_jax.run.logging.samples import Sample

SAMPLES_FILE = "samples.json"
MOST_STEPS = 50  # in the file
MOST_CHARACTERS = 4000  # of a text: of a longer one its begin and its end


class SamplesFile:
    """
    Args:
      folder: of the run; a file that is there is gone on with.
      resume_step: what the file has from this step on is left out.
    """

    def __init__(self, folder: Path, resume_step: int | None):
        self._folder = folder
        found = {} if resume_step is None else gone_on_with(read_samples, folder, "samples")
        self._steps = {step: few for step, few in found.items() if step < (resume_step or 0)}

    def add(self, step: int, samples: Sequence[Sample]) -> None:
        """The file with these too."""
        self._steps[step] = [_cut(one) for one in samples]
        newest = sorted(self._steps, reverse=True)[:MOST_STEPS]
        self._steps = {step: self._steps[step] for step in newest}
        rows = {str(step): [asdict(one) for one in few] for step, few in self._steps.items()}
        replace_text(self._folder / SAMPLES_FILE, f"{json.dumps(rows)}\n")


def read_samples(folder: Path) -> Mapping[int, Sequence[Sample]]:
    """The samples of a run, by step, the newest first; of no file none.

    Long texts are cut as they are there.

    Raises:
      UserError: the file is not as a run writes it.
    """
    return read_kept(folder / SAMPLES_FILE, "the samples of its steps", _samples, {})


def _samples(rows: Any) -> Mapping[int, Sequence[Sample]]:
    return {int(step): [declared(Sample(**each)) for each in few] for step, few in rows.items()}


def _cut(sample: Sample) -> Sample:
    texts = {"prompt": sample.prompt, "completion": sample.completion, "answer": sample.answer}
    return replace(sample, **{name: _shortened(text) for name, text in texts.items()})


def _shortened(text: str | None) -> str | None:
    if text is None or len(text) <= MOST_CHARACTERS:
        return text
    half = MOST_CHARACTERS // 2
    return f"{text[:half]}\n[… {len(text) - 2 * half:,} characters …]\n{text[-half:]}"
