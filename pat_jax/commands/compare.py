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
from pat_jax.run.files.folder import CONFIG_FILE, METRICS_FILE, flat
from pat_jax.run.logging.page import curves, numbers
from pat_jax.run.logging.page.panels import OTHERS, Rows
from pat_jax.run.logging.page.run_page import options_in, rows_in

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
        found = shown([*runs])
        raise UserError(f"option --runs is {found}: expected the folders of two or more runs.")
    folders = [_folder(run) for run in runs]
    places = [Path(os.path.abspath(folder)) for folder in folders]
    if same := next((place for place in places if places.count(place) > 1), None):
        raise UserError(f"{same} is given twice: expected different runs; leave one out.")
    is_unique = len({place.name for place in places}) == len(places)
    names = [place.name for place in places] if is_unique else map(str, folders)
    named = dict(zip(names, folders, strict=True))
    rows = {name: rows_in(folder) for name, folder in named.items()}
    options = _beside({name: _options(folder) for name, folder in named.items()})
    options = {name: values for name, values in options.items() if len({*values.values()}) > 1}
    results = _beside({name: _results(each) for name, each in rows.items()})
    tables = {"Results": _table(results), "Options that differ": _table(options)}
    page = rendered(TEMPLATE, runs=rows, tables=tables, curves=curves, OTHERS=OTHERS)
    path = Path(out)
    path.absolute().parent.mkdir(parents=True, exist_ok=True)
    replace_text(path, page)
    return Compared(path, options, results)


def _folder(given: Any) -> Path:
    if not isinstance(given, str | os.PathLike):
        raise UserError(f"run is {shown(given)}: expected the folder of a run, as text or a path.")
    folder = Path(given)
    if not os.path.isfile(folder / METRICS_FILE):
        raise UserError(f"{given} has no {METRICS_FILE}: expected the folder of a run.")
    return folder


def _options(folder: Path) -> dict[str, str]:
    """Returns the options of a run by their full names, as text."""
    try:
        found = flat(options_in(folder))
    except yaml.YAMLError:
        path = folder / CONFIG_FILE
        raise UserError(f"{path} is not YAML: mend it, or leave this run out.") from None
    return {name: _text(value) for name, value in found.items() if name != "run_dir"}


def _text(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return " ".join(map(str, value)) if isinstance(value, list) else str(value)


def _results(rows: Rows) -> dict[str, str]:
    steps = f"{max((row['step'] for row in rows), default=0):,}"
    return {"steps": steps} | {fact.words: fact.value for fact in numbers.facts(rows)}


def _beside(values: Mapping[str, Mapping[str, str]]) -> dict[str, dict[str, str]]:
    """Turns values by run and name into values by name and run, empty where a run has none."""
    names = dict.fromkeys(name for each in values.values() for name in each)
    return {name: {run: each.get(name, "") for run, each in values.items()} for name in names}


def _table(rows: Mapping[str, Mapping[str, str]]) -> Table:
    runs = [*next(iter(rows.values()), {})]
    return Table(["", *runs], [[name, *values.values()] for name, values in rows.items()])
