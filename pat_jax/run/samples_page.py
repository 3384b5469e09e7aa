"""Sample responses as one HTML file that needs nothing else: newest first, of the latest steps."""

import json
import re
from collections.abc import Sequence
from dataclasses import asdict, replace
from html import escape
from itertools import groupby
from pathlib import Path
from typing import Any

from pat_jax.common.declared_types import has_declared_types
from pat_jax.common.errors import UserError
from pat_jax.common.files import replace_text
from pat_jax.common.json_text import parse_json
from pat_jax.common.web_page import web_page
from pat_jax.run.samples import Sample

SAMPLES_FILE = "samples.html"
MOST_STEPS = 50  # on the page
MOST_CHARACTERS = 4000  # of a text: of a longer one its begin and its end

# Nothing that was escaped looks like the end of one.
_STEP = re.compile(r'<section id="step-(\d+)">.*?</section>\n', re.DOTALL)
_DATA = re.compile(r'<template data-step="(\d{1,18})">(.*?)</template>')


class SamplesPage:
    """
    Args:
      folder: of the run; a page that is there is gone on with.
      resume_step: what the page has from this step on is left out.
    """

    def __init__(self, folder: Path, resume_step: int | None):
        self._path, self._title = folder / SAMPLES_FILE, folder.resolve().name
        self._sections: dict[int, str] = {}
        if resume_step is not None and self._path.exists():
            text = self._path.read_text(encoding="utf-8", errors="replace")
            found = {int(match[1]): match[0] for match in _STEP.finditer(text)}
            self._sections = {step: each for step, each in found.items() if step < resume_step}

    def samples(self, step: int, samples: Sequence[Sample]) -> None:
        """The page with these too."""
        self._sections[step] = _section(step, samples)
        newest = sorted(self._sections, reverse=True)[:MOST_STEPS]
        self._sections = {step: self._sections[step] for step in newest}
        header = f"<header><p>Sample responses</p><h1>{escape(self._title)}</h1></header>\n"
        content = f"{header}{''.join(self._sections.values())}"
        replace_text(self._path, web_page(f"samples of {self._title}", content))


def read_samples(folder: Path) -> dict[int, list[Sample]]:
    """The samples on the page of a run, by step, the newest first; of no page none.

    Long texts are cut as they are there.
    """
    path = folder / SAMPLES_FILE
    if not path.is_file():
        return {}
    found = _DATA.finditer(path.read_text(encoding="utf-8", errors="replace"))
    try:
        return {int(match[1]): _samples(match[2]) for match in found}
    except (ValueError, TypeError) as error:
        raise UserError(
            f"{path} is not as a run writes it ({error}): expected the samples of its steps; begin another page by "
            "moving it away."
        ) from None


def _samples(text: str) -> list[Sample]:
    rows: Any = parse_json(text)
    samples = [Sample(**each) for each in rows]
    if not all(map(has_declared_types, samples)):
        raise TypeError("a sample has fields of other types")
    return samples


def _section(step: int, samples: Sequence[Sample]) -> str:
    parts = [f'<section id="step-{step}"><h2>step {step}</h2>']
    # For programs. Nothing in it can end the template, which no browser shows.
    cut = [replace(x, prompt=_cut(x.prompt), completion=_cut(x.completion)) for x in samples]
    data = json.dumps([asdict(each) for each in cut]).replace("<", "\\u003c")
    parts.append(f'<template data-step="{step}">{data}</template>')
    for prompt, group in groupby(samples, key=lambda sample: sample.prompt):
        parts.append(
            f"<details open><summary>prompt</summary><pre>{_shown(prompt)}</pre></details>"
        )
        for sample in group:
            facts = escape(sample.facts)
            parts.append(f'<p class="source">{facts}</p><pre>{_shown(sample.completion)}</pre>')
    return f"{''.join(parts)}</section>\n"


def _shown(text: str) -> str:
    return escape(_cut(text))


def _cut(text: str) -> str:
    if len(text) <= MOST_CHARACTERS:
        return text
    half = MOST_CHARACTERS // 2
    left_out = f"\n[… {len(text) - 2 * half:,} characters …]\n"
    return f"{text[:half]}{left_out}{text[-half:]}"
