"""The command `compare`: a page of the curves of several runs, and the options that differ.

Reads only files, so that the runs may still be running.
"""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from pat_jax.common.errors import UserError, shown
from pat_jax.common.files import replace_text
from pat_jax.common.html.render import rendered
from pat_jax.common.text_table import Table, text_table
from pat_jax.run.files.folder import CONFIG_FILE, METRICS_FILE
from pat_jax.run.logging.metrics import read_metrics
from pat_jax.run.logging.page import curves, numbers
from pat_jax.run.logging.page.panels import OTHERS, Rows

TEMPLATE = Path(curves.__file__).with_name("compare.html.jinja")


@dataclass(frozen=True)
class Compared:
    """The page of several runs, and what is in its tables."""

    path: Path  # of the page
    options: Mapping[str, Mapping[str, str]]  # those that differ: values by the name of the run
    results: Mapping[str, Mapping[str, str]]  # main numbers by the name of the run

    def __repr__(self) -> str:
        tables = [text_table(*_table(rows)) for rows in (self.results, self.options) if rows]
        return "\n\n".join([*tables, f"page: {self.path}"])


def compared(runs: Sequence[Any], out: str) -> Compared:
    """Writes the page. Raises UserError if a folder is not that of a run, or `out` cannot be
    written."""
    if len(runs) < 2:
        raise UserError(
            f"option --runs is {shown([*runs])}: expected the folders of two or more runs."
        )
    folders = [_folder(run) for run in runs]
    is_unique = len({folder.name for folder in folders}) == len(folders)
    names = [folder.name if is_unique else str(folder) for folder in folders]
    rows = {name: _rows(folder) for name, folder in zip(names, folders, strict=True)}
    options = _differing(
        {name: _options(folder) for name, folder in zip(names, folders, strict=True)}
    )
    found = Compared(Path(out), options, _results(rows))
    tables = {"Results": _table(found.results), "Options that differ": _table(options)}
    page = rendered(TEMPLATE, runs=rows, tables=tables, curves=curves, OTHERS=OTHERS)
    found.path.absolute().parent.mkdir(parents=True, exist_ok=True)
    replace_text(found.path, page)
    return found


def _folder(given: Any) -> Path:
    if not isinstance(given, str | os.PathLike):
        raise UserError(f"run is {shown(given)}: expected the folder of a run, as text or a path.")
    folder = Path(given)
    if not any(os.path.isfile(folder / name) for name in (METRICS_FILE, CONFIG_FILE)):
        raise UserError(f"{given} has no {METRICS_FILE}: expected the folder of a run.")
    return folder


def _rows(folder: Path) -> Rows:
    path = folder / METRICS_FILE
    return read_metrics(path) if path.is_file() else []


def _options(folder: Path) -> dict[str, str]:
    """Returns the options of a run as text, by their full names."""
    path = folder / CONFIG_FILE
    found = (path.is_file() and yaml.safe_load(path.read_text(encoding="utf-8"))) or {}
    sections = {name: value for name, value in found.items() if isinstance(value, dict)}
    every = {name: value for name, value in found.items() if name not in sections}
    for section, values in sections.items():
        every |= {f"{section}.{name}": value for name, value in values.items()}
    return {name: _text(value) for name, value in every.items() if name != "run_dir"}


def _text(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return " ".join(map(str, value)) if isinstance(value, list) else str(value)


def _differing(options: Mapping[str, Mapping[str, str]]) -> dict[str, dict[str, str]]:
    names = dict.fromkeys(name for each in options.values() for name in each)
    rows = {name: {run: each.get(name, "") for run, each in options.items()} for name in names}
    return {name: values for name, values in rows.items() if len({*values.values()}) > 1}


def _results(rows_of: Mapping[str, Rows]) -> dict[str, dict[str, str]]:
    facts = {
        run: {"steps": f"{max((row['step'] for row in rows), default=0):,}"}
        | {fact.words: fact.value for fact in numbers.facts(rows)}
        for run, rows in rows_of.items()
    }
    names = dict.fromkeys(name for each in facts.values() for name in each)
    return {name: {run: each.get(name, "") for run, each in facts.items()} for name in names}


def _table(rows: Mapping[str, Mapping[str, str]]) -> Table:
    names = [*next(iter(rows.values()), {})]
    return Table(["", *names], [[name, *values.values()] for name, values in rows.items()])
